"""A folder that was downloaded: what is read of it, or copied from it, lies in it."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

from meshpar.errors import Problems
from meshpar.regular import open_regular

LONGEST_JSON = 100_000_000


def check_inside(folder: Path, name: str) -> None:
    """Checks that a file of the folder lies in it.

    A link may lead to another file of the folder. Where the folder is a snapshot in the cache of Hugging Face's
    library, a link may also lead to the `blobs` beside the snapshots.

    Raises:
      OSError: the file is not there, or leads out of the folder.
    """
    try:
        whole, there = folder.resolve(), (folder / name).resolve(strict=True)
    except (RuntimeError, ValueError) as error:  # links in a circle, a zero byte
        raise OSError(errno.EINVAL, str(error).splitlines()[0], str(folder / name)) from None
    # `blobs` is not resolved: if it is a link itself, the files behind it are not beside the snapshots.
    blobs = [whole.parents[1] / "blobs"] if whole.parent.name == "snapshots" else []
    if not any(there.is_relative_to(allowed) for allowed in [whole, *blobs]):
        raise OSError(errno.EPERM, f"it is a link that leads out of the folder, to {there}", str(folder / name))


def read_json(folder: Path, name: str, problems: Problems) -> dict[str, Any]:
    """A JSON object that a file of the folder holds; an empty one, and the problem, if it holds none."""
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
        problems.add(where, "holds no mapping of keys" if read is not None else "holds no mapping of keys, or too many")
        return {}
    return read
