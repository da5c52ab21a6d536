"""Checksums of files: the arrays' library takes a flipped bit for data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from meshpar.errors import CheckpointError, Problems

FILE = "sha256.json"
THREADS = 4  # hashing releases Python's lock


def write(folder: Path) -> None:
    """Writes the SHA-256 of every file below `folder` into `FILE`, by path."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(THREADS) as threads:
        sums = dict(zip(files, threads.map(sha256, (folder / name for name in files)), strict=True))
    (folder / FILE).write_text(json.dumps(sums, indent=2))


def read(folder: Path) -> dict[str, str]:
    """Path -> SHA-256.

    Raises:
      CheckpointError: they are not there, are damaged, or name a file outside of the folder.
    """
    try:
        sums = json.loads((folder / FILE).read_text())
        inside = all(isinstance(name, str) and _is_inside(folder, name) for name in sums)
    except (OSError, ValueError, AttributeError):
        inside = False
    if not inside:
        raise CheckpointError(f"{folder / FILE} cannot be read, so the checkpoint cannot be verified")
    return sums


def verify(folder: Path, sums: Mapping[str, str], names: Iterable[str]) -> None:
    """Reads files, and compares.

    Raises:
      CheckpointError: lists each file that is not what was written.
    """
    problems, names = Problems(), list(names)
    with ThreadPoolExecutor(THREADS) as threads:
        for name, found in zip(names, threads.map(sha256, (folder / name for name in names)), strict=True):
            if found is None:
                problems.add(str(folder / name), "is missing")
            elif found != sums[name]:
                problems.add(str(folder / name), "is not what was written")
    fix = "remove the folder to go on from the step before it"
    problems.raise_any(CheckpointError, f"the checkpoint {folder} is damaged; {fix}:")


def sha256(path: Path) -> str | None:
    """Of one file; None if it is not there."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _is_inside(folder: Path, name: str) -> bool:
    return (folder / name).resolve().is_relative_to(folder.resolve())
