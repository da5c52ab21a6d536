"""Checksums of the data files, by which a run that resumes from a checkpoint detects changed files."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

from meshpar.errors import DataError, DataWarning, Problems
from meshpar.regular_files import open_regular

MOST_FILES = 1000
"""More files share one checksum, because each checkpoint stores all of them."""
MOST_NAMED = 10
THREADS = 4  # hashing releases Python's lock
TASKS = 32
"""Many small files are hashed in few tasks: a task takes as long as such a file."""
_SMALL = 2**20
_BLOCK = 2**22
_SETTLED_NS = 2 * 10**9
_known: dict[tuple[Any, ...], str] = {}


def crc32(path: Path) -> int:
    """The CRC-32 of a file's content: it detects every error burst of up to 32 bits, and misses one in 4e9 of all other
    errors.

    Raises:
      OSError: the file cannot be read.
    """
    total = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            total = zlib.crc32(block, total)
    return total


def checksum(path: Path) -> str:
    """The SHA-256 of a file's content; cached in memory while the file is not modified.

    Raises:
      OSError: the file cannot be read.
    """
    stat = path.stat()
    key = (str(path), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    if key in _known:
        return _known[key]
    with open_regular(path) as file:
        # `file_digest` allocates a buffer of 256 KiB, which takes longer than a small file.
        digest = hashlib.sha256(file.read()) if stat.st_size < _SMALL else hashlib.file_digest(file, "sha256")
    sha256 = digest.hexdigest()
    if time.time_ns() - stat.st_ctime_ns > _SETTLED_NS:  # a later write might have the same time
        _known[key] = sha256
    return sha256


def fingerprint(files: Mapping[str, Path]) -> dict[str, str]:
    """The checksum of each file, by its name.

    Raises:
      DataError: lists the files that cannot be read.
    """
    problems = Problems()

    def read(path: Path) -> str:
        try:
            return checksum(path)[:32]
        except OSError as error:
            problems.add(str(path), f"cannot be read: {error.strerror}")
            return ""

    def read_all(paths: Sequence[Path]) -> list[str]:
        return [read(path) for path in paths]

    paths = list(files.values())
    size = -(-len(paths) // TASKS)
    parts = [paths[start : start + size] for start in range(0, len(paths), max(1, size))]
    with ThreadPoolExecutor(THREADS) as threads:
        checksums = dict(zip(files, chain.from_iterable(threads.map(read_all, parts)), strict=True))
    problems.raise_any(DataError, "the data cannot be read:")
    if len(checksums) <= MOST_FILES:
        return checksums
    return {f"{len(checksums)} files": hashlib.sha256(json.dumps(checksums, sort_keys=True).encode()).hexdigest()[:32]}


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """File name -> how the file has changed.

    >>> changes({"a": "1", "b": "2"}, {"b": "3", "c": "4"})
    {'a': 'is missing', 'b': 'has changed', 'c': 'is new'}
    """
    changed = {}
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            changed[name] = "is missing"
        elif name not in before:
            changed[name] = "is new"
        elif before[name] != now[name]:
            changed[name] = "has changed"
    return changed


def changed_files(before: Any, now: Mapping[str, str], folder: Path, allowed: bool) -> list[str]:
    """The names of the files that differ from those of a checkpoint.

    Args:
      before: the fingerprint in the checkpoint; None in old checkpoints.
      folder: the checkpoint's folder, for messages.
      allowed: whether the run may resume with changed files.

    Raises:
      DataError: files have changed, and this is not allowed.

    Warns:
      DataWarning: files have changed, and this is allowed.
    """
    if not isinstance(before, dict):
        return []
    changed = changes({str(name): str(value) for name, value in before.items()}, now)
    if not changed:
        return []
    problems = Problems()
    for name, what in list(changed.items())[:MOST_NAMED]:
        problems.add(name, what)
    if len(changed) > MOST_NAMED:
        problems.add(f"{len(changed) - MOST_NAMED} more files", "have changed")
    if not allowed:
        fix = "restore the files, or resume with the files as they are now: data.if_changed=allow"
        problems.add("data.if_changed = refuse", "the next batches would differ from those of the stopped run", fix)
    message = "\n".join([f"the data differ from those of {folder}:", *map(str, problems.found)])
    if not allowed:
        raise DataError(message)
    warnings.warn(message, DataWarning, stacklevel=2)
    return list(changed)
