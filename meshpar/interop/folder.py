"""Reads files of a downloaded folder, and none outside of it: JSON, and the headers of tensors."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from meshpar.errors import Problems
from meshpar.interop.safetensors import Tensor, tensors_in
from meshpar.regular_files import open_regular

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
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


def tensors_of(folder: Path, problems: Problems) -> dict[str, Tensor]:
    """The tensors of a folder by name, not read yet."""
    if os.path.lexists(folder / INDEX):
        return _indexed(folder, problems)
    if not os.path.lexists(folder / WEIGHTS):
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        fix = f"{pickles[0]} is a pickle, which is not read: save the model as safetensors" if pickles else ""
        problems.add(str(folder), f"there is neither {WEIGHTS} nor {INDEX}", fix)
        return {}
    return _tensors_of(folder, WEIGHTS, problems)


def _indexed(folder: Path, problems: Problems) -> dict[str, Tensor]:
    where = read_json(folder, INDEX, problems).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        problems.add(str(folder / INDEX), "has no weight_map from names to files")
        return {}
    found: dict[str, Tensor] = {}
    for file in sorted(set(where.values())):
        if Path(file).name != file:
            problems.add(f"{folder / INDEX}: weight_map", f"{file!r} is not the name of a file in this folder")
            continue
        before = len(problems)
        tensors = _tensors_of(folder, file, problems)
        is_readable = len(problems) == before
        for name in (name for name in where if where[name] == file):
            if name in tensors:
                found[name] = tensors[name]
            elif is_readable:
                problems.add(str(folder / file), f"has no {name}, though the index says so")
    return found


def _tensors_of(folder: Path, file: str, problems: Problems) -> dict[str, Tensor]:
    try:
        check_inside(folder, file)
    except OSError as error:
        problems.add(str(folder / file), f"cannot be read: {error.strerror}")
        return {}
    return tensors_in(folder / file, problems)
