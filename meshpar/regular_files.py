"""Opens files that may not be regular files, and says of a path what it cannot be and what may have been meant.

Reading a pipe could block for ever, and a device has no end.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from io import BufferedReader
from pathlib import Path, PurePath

from meshpar.errors import nearest

_REMOTE = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)
_MOUNTS = {"gs": "mount it with gcsfuse", "s3": "mount it with mount-s3", "hf": "download it with `hf download`"}


STORES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub", "file": "fsspec"}
"""Scheme of the addresses that data are copied from -> the package that reads them for fsspec."""


def stored(path: str) -> bool:
    """Whether a path is an address that data are copied from.

    >>> stored("s3://bucket/texts"), stored("texts"), stored("http://host/texts")
    (True, False, False)
    """
    found = _REMOTE.fullmatch(path)
    return bool(found) and found[1] in STORES  # pyright: ignore


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


def remote(path: PurePath | str) -> tuple[str, str] | None:
    """What is wrong with an address such as `s3://bucket/run`, and the fix; None for a local path.

    Without this a folder called `s3:` would be made. A local folder of such a name is written with a folder before it.

    >>> remote(Path("s3://bucket/run"))
    ('s3://bucket/run is a remote address, and only local paths are read and written', 'mount it with mount-s3')
    >>> remote("runs/s3:/x") is remote("C:/x") is None
    True
    """
    if not (found := _REMOTE.fullmatch(str(path))):
        return None
    scheme, rest = found.groups()
    fix = f"leave out {scheme}://" if scheme == "file" else _MOUNTS.get(scheme.lower(), "copy it here, or mount it")
    return f"{scheme}://{rest} is a remote address, and only local paths are read and written", fix


def nearby(path: Path) -> str:
    """For a path that does not exist: the folder that it is relative to, and the nearest name that is there."""
    there = [] if path.is_absolute() else [f"it is relative to the working directory, {Path.cwd()}"]
    parent = next((folder for folder in path.parents if os.path.isdir(folder)), Path())
    rest = path.relative_to(parent).parts if path.is_relative_to(parent) else ()
    try:
        near = nearest(rest[0], os.listdir(parent)) if rest and not os.path.lexists(parent / rest[0]) else None
    except OSError:
        near = None
    return "; ".join([*there, *([f"did you mean {parent / near}?"] if near else [])])
