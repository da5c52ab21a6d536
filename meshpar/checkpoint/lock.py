"""A lock that lets one run write into a folder. The kernel releases it when its process ends, even by SIGKILL."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import jax

from meshpar.checkpoint.agree import on_all
from meshpar.checkpoint.durable import make_folder
from meshpar.errors import CheckpointError

FILE = ".lock"


@contextmanager
def hold(folder: Path) -> Iterator[bool]:
    """Locks a folder, and creates it if it is missing. All processes call it; the first one holds the lock.

    Yields:
      Whether the folder is locked. Some network file systems have no locks; then it warns and yields False.

    Raises:
      CheckpointError: another process holds the folder, or the folder cannot be written.
    """
    with ExitStack() as stack:
        locked = True

        def acquire() -> None:
            nonlocal locked
            locked = stack.enter_context(hold_alone(folder))

        on_all(acquire if jax.process_index() == 0 else lambda: None)
        yield locked


def is_held(folder: Path) -> bool:
    """Whether a process holds the folder, as far as its file system has locks."""
    try:
        check_unheld(folder)
    except CheckpointError:
        return True
    return False


def check_unheld(folder: Path) -> None:
    """Raises CheckpointError if a process holds the folder. Nothing is created."""
    try:
        file = os.open(folder / FILE, os.O_RDWR)
    except OSError:  # without a file there is no lock; whether the folder can be written is checked later
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(folder) from None
    except OSError:  # the file system has no locks
        pass
    finally:
        os.close(file)


@contextmanager
def hold_alone(folder: Path) -> Iterator[bool]:
    path = folder / FILE
    try:
        make_folder(folder)
        file = _acquire(path)
    except BlockingIOError:
        raise _in_use(folder) from None
    except OSError as error:
        raise CheckpointError(f"run_dir: {folder} cannot be written: {error.strerror}") from None
    if file is None:
        warnings.warn(f"{folder} is on a file system without locks: let no second run write there", stacklevel=3)
        yield False
        return
    try:
        yield True
    finally:
        with suppress(OSError):  # the folder may have been removed
            path.unlink()
        os.close(file)


def _acquire(path: Path) -> int | None:
    """The descriptor of the locked file; None where the file system has no locks.

    Raises:
      BlockingIOError: another process holds it.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_still_there(path, file):  # the previous holder removed it before this lock was granted
                os.close(file)
                continue
            os.ftruncate(file, 0)
            started = datetime.now(UTC).isoformat(timespec="seconds")
            os.write(file, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": started}).encode())
            return file
        except OSError as error:
            os.close(file)
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                return None
            raise


def _is_still_there(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _in_use(folder: Path) -> CheckpointError:
    what = f"{folder} is in use by {_holder(folder / FILE)}; set another run_dir, or stop that process"
    return CheckpointError(f"run_dir: {what}")


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
        return f"process {holder['pid']} on {holder['host']}, since {holder['started']}"
    except (OSError, ValueError, KeyError, TypeError):  # the holder has not written the file yet
        return "another process"
