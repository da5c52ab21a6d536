"""Opens files that may not be regular files: reading a pipe could block for ever, and a device has no end."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file, or a link to one, for reading.

    Raises:
      OSError: the file cannot be opened, or it is a folder, a pipe, a socket or a device.

    >>> open_regular(Path("/dev/null"))
    Traceback (most recent call last):
        ...
    OSError: [Errno 22] it is a device, not a regular file: '/dev/null'
    """
    return os.fdopen(_opened(path), "rb")


def check_regular(path: Path) -> None:
    """Raises the errors of `open_regular`, and reads nothing."""
    os.close(_opened(path))


def _opened(path: Path) -> int:
    """The descriptor of a regular file."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:
        raise OSError(errno.EINVAL, "its name contains a zero byte", str(path)) from None
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return file
    os.close(file)
    kind = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device"
    raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
