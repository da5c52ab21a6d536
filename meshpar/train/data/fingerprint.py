"""Checksums of the files that a run reads, by which it knows them again when it goes on from a checkpoint."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from meshpar.errors import DataError, DataWarning, Problems
from meshpar.regular import open_regular

MOST_FILES = 1000
"""More files have one checksum together: each checkpoint holds all that there are."""
MOST_NAMED = 10
THREADS = 4  # hashing releases Python's lock
_SETTLED_NS = 2 * 10**9
_known: dict[tuple[Any, ...], str] = {}


def checksum(path: Path) -> str:
    """The SHA-256 of a file's content. A file that was not written since is not read again.

    Raises:
      OSError: it cannot be read.
    """
    stat = path.stat()
    key = (str(path), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    if key in _known:
        return _known[key]
    with open_regular(path) as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if time.time_ns() - stat.st_ctime_ns > _SETTLED_NS:  # else a second write might bear the same time
        _known[key] = found
    return found


def fingerprint(files: Mapping[str, Path]) -> dict[str, str]:
    """The checksum of each file, under a name that does not depend on where the data lie.

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

    with ThreadPoolExecutor(THREADS) as threads:
        found = dict(zip(files, threads.map(read, files.values()), strict=True))
    problems.raise_any(DataError, "the data cannot be read:")
    if len(found) <= MOST_FILES:
        return found
    return {f"{len(found)} files": hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:32]}


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Name of a file -> what is other than it was.

    >>> changes({"a": "1", "b": "2"}, {"b": "3", "c": "4"})
    {'a': 'is not there any more', 'b': 'has other content', 'c': 'is new'}
    """
    found = {}
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            found[name] = "is not there any more"
        elif name not in before:
            found[name] = "is new"
        elif before[name] != now[name]:
            found[name] = "has other content"
    return found


def changed_files(before: Any, now: Mapping[str, str], folder: Path, allowed: bool) -> list[str]:
    """The files that are not those of a checkpoint.

    Args:
      before: what the checkpoint says of its files; older ones say nothing.
      folder: of the checkpoint.
      allowed: whether the run goes on all the same.

    Raises:
      DataError: it does not.

    Warns:
      DataWarning: it does.
    """
    found = changes({str(name): str(value) for name, value in before.items()}, now) if isinstance(before, dict) else {}
    if not found:
        return []
    problems = Problems()
    for name, what in list(found.items())[:MOST_NAMED]:
        problems.add(name, what)
    if len(found) > MOST_NAMED:
        problems.add(f"{len(found) - MOST_NAMED} files more", "are not what they were")
    heading = f"the data are not those of {folder}:"
    if allowed:
        warnings.warn("\n".join([heading, *map(str, problems.found)]), DataWarning, stacklevel=2)
        return list(found)
    fix = "put the files back as they were, or go on with those that are here now: data.if_changed=allow"
    problems.add("data.if_changed = refuse", "the next batches would not be those of the run that was stopped", fix)
    raise DataError("\n".join([heading, *map(str, problems.found)]))
