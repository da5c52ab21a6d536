"""Reads files of a downloaded folder, and none outside of it."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

from meshpar.errors import Problems
from meshpar.regular_files import open_regular

LONGEST_JSON = 100_000_000
MODEL_FILES = "hugging_face"
"""The folder in a run directory with the `config.json`, the tokenizer and the chat template of the run's model."""
SOURCE = "source.json"
"""The file in it that names the folder which was converted."""


def check_inside(folder: Path, name: str) -> None:
    """Checks that a file is inside the folder, after links are resolved.

    If the folder is a snapshot in Hugging Face's cache, a link may also lead to the `blobs` next to the snapshots.

    Raises:
      OSError: the file is missing, or a link leads out of the folder.
    """
    try:
        root = folder.resolve()
        file = (folder / name).resolve(strict=True)
    except (RuntimeError, ValueError) as error:  # links in a circle, a zero byte
        raise OSError(errno.EINVAL, str(error).splitlines()[0], str(folder / name)) from None
    # `blobs` is not resolved: if it is a link itself, the files behind it are somewhere else.
    blobs = [root.parents[1] / "blobs"] if root.parent.name == "snapshots" else []
    if not any(file.is_relative_to(allowed) for allowed in [root, *blobs]):
        raise OSError(errno.EPERM, f"it is a link that leads out of the folder, to {file}", str(folder / name))


def read_json(folder: Path, name: str, problems: Problems) -> dict[str, Any]:
    """The JSON object in a file of the folder. If there is none, an empty dict, and a problem is added."""
    where = str(folder / name)
    try:
        check_inside(folder, name)
        with open_regular(folder / name) as file:
            text = file.read(LONGEST_JSON + 1)
        read = json.loads(text) if len(text) <= LONGEST_JSON else None
    except OSError as error:
        problems.add(where, f"cannot be read: {error.strerror}")
        return {}
    except (ValueError, RecursionError) as error:
        problems.add(where, f"is not JSON: {error}")
        return {}
    if not isinstance(read, dict) or not read:
        too_long = f", or more than {LONGEST_JSON} bytes" if read is None else ""
        problems.add(where, f"holds no JSON object{too_long}")
        return {}
    return read
