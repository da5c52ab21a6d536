"""Files that survive a power cut: what is only written stays in the system's memory for up to half a minute."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

THREADS = 16
"""Files that are synced at once: the file system writes its journal for all of them together."""


def sync(path: Path) -> None:
    """Returns when the disk holds a file's bytes, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no sync for folders
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Syncs every file and folder below `folder`, and the folder itself; its own name is synced with its parent."""
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in threads.map(sync, [folder, *folder.rglob("*")]):
            pass  # an error is raised here


def make_folder(folder: Path) -> None:
    """Makes a folder and its parents, and syncs the name of each new one."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        sync(path.parent)
