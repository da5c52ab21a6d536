"""Reads and writes copies of a state in the memory of a host, from which a run resumes after a process has died.

A *part* consists of the shards of a state on the devices of one process. Its file is in a tmpfs, which survives the
process, but not the host:

    /dev/shm/meshpar-1000/5f0c.../91ab.../70.0     step 70, part 0

The second folder belongs to a run directory. The name of the third is a hash of everything that must be equal for a run
to resume from these files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from meshpar.checkpoint.saved import FOLDER, steps
from meshpar.errors import CheckpointError, DamagedError

MEMORY = "MESHPAR_MEMORY"
"""The environment variable that names a folder instead of `TMPFS`."""
TMPFS = "/dev/shm"
_PARTIAL = ".partial"
_CHECKSUM_BYTES = hashlib.sha256().digest_size


def folder_of(run_dir: Path) -> Path:
    """The folder of a run's files on this host; it may not exist."""
    root = Path(os.environ.get(MEMORY, TMPFS)) / f"meshpar-{os.getuid()}"
    return root / hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:16]


def make(folder: Path) -> None:
    """Makes a folder of `folder_of`, which only its owner can read.

    Raises:
      CheckpointError: the folder cannot be made, or another user owns it.
    """
    root = folder.parent
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(exist_ok=True)
    except OSError as error:
        what = f"{root} cannot be made: {error.strerror}"
        raise CheckpointError(f"checkpoints.memory_every: {what}; set {MEMORY} to a folder in memory") from None
    if root.stat().st_uid != os.getuid():
        raise CheckpointError(f"checkpoints.memory_every: {root} belongs to another user; set {MEMORY} to a folder")


def parts(folder: Path) -> dict[int, set[int]]:
    """Step -> the parts whose files are in a folder."""
    found: dict[int, set[int]] = {}
    for path in folder.glob("*.*"):
        if path.suffix != _PARTIAL:
            step, _, part = path.name.partition(".")
            found.setdefault(int(step), set()).add(int(part))
    return found


def last_step(run_dir: Path) -> int | None:
    """The last step with a checkpoint or with a file in the memory of this host; None if there is neither."""
    copied = [step for folder in folder_of(run_dir).glob("*") for step in parts(folder)]
    return max([*steps(run_dir / FOLDER), *copied], default=None)


def keep(folder: Path, kept: Collection[int | None]) -> None:
    """Removes the files of all other steps."""
    for path in folder.glob("*.*"):
        if int(path.name.partition(".")[0]) not in kept:
            path.unlink(missing_ok=True)


def write(path: Path, shards: Iterable[np.ndarray]) -> None:
    """Writes the bytes of arrays one after the other, and their SHA-256."""
    checksum = hashlib.sha256()
    partial = path.with_name(f"{path.name}.{os.getpid()}{_PARTIAL}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("wb") as file:
        for shard in shards:
            content: Any = shard.reshape(-1).view(np.uint8)
            checksum.update(content)
            file.write(content)
        file.write(checksum.digest())
    partial.rename(path)


def read(path: Path) -> memoryview:
    """The bytes that `write` wrote, without the checksum.

    Raises:
      DamagedError: the file is missing, or does not match its checksum.
    """
    try:
        content = memoryview(path.read_bytes())
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from None
    if hashlib.sha256(content[:-_CHECKSUM_BYTES]).digest() != content[-_CHECKSUM_BYTES:]:
        raise DamagedError(f"{path} does not match its checksum")
    return content[:-_CHECKSUM_BYTES]
