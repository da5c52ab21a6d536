"""What the disk refuses while a run goes on becomes one line."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshpar.errors import MeshparError, RunError

# TensorStore raises a ValueError whose text holds that of the operating system.
_REASONS = {
    errno.ENOSPC: "when there is room again, the same command goes on from the last checkpoint",
    errno.EDQUOT: "when there is room again, the same command goes on from the last checkpoint",
    errno.ENOENT: "was the folder moved or removed while the run wrote to it?",
}


@contextmanager
def writing(what: str, where: Path) -> Iterator[None]:
    """Within, `what` is written to the file or folder `where`.

    Raises:
      RunError: it cannot be written.

    >>> with writing("a record", Path("metrics.jsonl")):
    ...     raise OSError(errno.ENOSPC, "No space left on device")
    Traceback (most recent call last):
        ...
    meshpar.errors.RunError: a record cannot be written to metrics.jsonl: No space left on device;
    when there is room again, the same command goes on from the last checkpoint
    """
    try:
        yield
    except MeshparError:
        raise
    except (OSError, ValueError) as error:
        reason, fix = _told(error)
        raise RunError(f"{what} cannot be written to {where}: {reason}" + (f"; {fix}" if fix else "")) from None


def _told(error: Exception) -> tuple[str, str]:
    """Why, and what to do about it, if that is known."""
    for number, fix in _REASONS.items():
        reason = os.strerror(number)
        if getattr(error, "errno", None) == number or reason in str(error):
            return reason, fix
    return getattr(error, "strerror", None) or str(error).partition("\n")[0], ""
