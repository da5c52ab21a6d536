"""Opens the files of pictures: each must be whole, and all that are not are named at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from meshpar.data.documents import no_data
from meshpar.data.files import find_or_take
from meshpar.data.images.shards import PictureShard
from meshpar.data.reading import read_each
from meshpar.errors import DataError


def opened(path: Path, glob: str, default: str, open_file: Callable[[Path], PictureShard]) -> tuple[PictureShard, ...]:
    """The files at `path` that have pictures.

    Args:
      default: the glob of their format.
      open_file: opens one, or raises ValueError(what is wrong), or ValueError(what is wrong, fix).

    Raises:
      DataError: lists the files that are not whole; or there is no picture.
    """
    files = find_or_take(path, glob, default)
    shards = [shard for _, _, shard in read_each(zip(files, files, strict=True), open_file)]
    with_pictures = tuple(shard for shard in shards if shard.length)
    if not with_pictures:
        raise no_data(str(path), "has no pictures: its files are empty")
    return with_pictures


def integer(label: object) -> int:
    """A label of a file.

    Raises:
      DataError: it is no integer.
    """
    try:
        if isinstance(label, (bytes, str)):
            return int(label)
        if isinstance(label, int) and not isinstance(label, bool):
            return label
    except ValueError:
        pass
    raise DataError(f"its label is {str(label)[:40]!r}, not an integer\n    number the classes from 0 on")
