"""Syncs files to disk, so that they survive a power cut; the page cache may hold written bytes for half a minute."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

THREADS = 16
"""Files synced at a time: the file system commits its journal for all of them together."""


def sync(path: Path) -> None:
    """Returns when a file's bytes, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Syncs `folder` and all files and folders below it. To sync the name of `folder`, sync its parent."""
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in threads.map(sync, [folder, *folder.rglob("*")]):
            pass  # raises the error of a failed sync


def make_folder(folder: Path) -> None:
    """Makes a folder and its parents, and syncs the name of each new one."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        sync(path.parent)
