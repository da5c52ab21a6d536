"""Turns errors of the file system during a run into errors of one line."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshpar.errors import MeshparError, RunError

_FIXES = {
    errno.ENOSPC: "free some space; the same command then resumes from the last checkpoint",
    errno.EDQUOT: "free some space; the same command then resumes from the last checkpoint",
    errno.ENOENT: "was the folder moved or removed while the run wrote to it?",
}


@contextmanager
def writing(what: str, where: Path) -> Iterator[None]:
    """Raises RunError if `what`, which is written within to the file or folder `where`, cannot be written.

    >>> with writing("a record", Path("metrics.jsonl")):
    ...     raise OSError(errno.ENOSPC, "No space left on device")
    Traceback (most recent call last):
        ...
    meshpar.errors.RunError: a record cannot be written to metrics.jsonl: No space left on device;
    free some space; the same command then resumes from the last checkpoint
    """
    try:
        yield
    except MeshparError:
        raise
    except (OSError, ValueError) as error:
        raise RunError(f"{what} cannot be written to {where}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """The reason, and the fix if it is known. TensorStore's ValueError contains the operating system's text."""
    for number, fix in _FIXES.items():
        reason = os.strerror(number)
        if getattr(error, "errno", None) == number or reason in str(error):
            return f"{reason}; {fix}"
    return getattr(error, "strerror", None) or str(error).partition("\n")[0]
