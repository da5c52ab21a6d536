"""Folders that appear complete: written under another name, synced and renamed. Caches and shards are written so.

A process that is killed leaves a folder `partial-...`, which is never read.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from meshpar.checkpoint.durable import sync, sync_tree
from meshpar.data.documents import no_data

PARTIAL = "partial-"


def partial_name(path: Path) -> Path:
    """A name beside `path` that no other process uses."""
    return path.with_name(f"{PARTIAL}{uuid4().hex}")


@contextmanager
def written(folder: Path, where: str) -> Iterator[Path]:
    """A new folder to write to, which becomes `folder` at the end, unless another process has written the same.

    Args:
      where: the key or option that names the place, for errors.

    Raises:
      DataError: it cannot be written.
    """
    partial = partial_name(folder)
    with writing(where):
        partial.mkdir(parents=True)
    try:
        yield partial
        with writing(where):
            sync_tree(partial)
            try:
                partial.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
            sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def discard(folder: Path, where: str) -> None:
    """Removes a folder, which disappears at once. Another process may have removed it."""
    aside = partial_name(folder)
    with writing(where), suppress(FileNotFoundError):
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def writing(where: str) -> Iterator[None]:
    """Raises a DataError for what the file system refuses."""
    try:
        yield
    except OSError as error:
        raise no_data(where, f"cannot be written: {error.strerror}") from None
