"""Cuts the files of a corpus into ranges of about the same size, which are read independently of each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileRange:
    """Consecutive documents: those of whole files, or a part of one file.

    Args:
      files: in order.
      start, stop: of a part, in units of the file's kind: bytes of JSON Lines, row groups of Parquet, batches of Arrow.
        A document belongs to the part in which it begins. Without `stop` the part ends with the file.
    """

    files: tuple[Path, ...]
    start: int = 0
    stop: int | None = None


def cut(files: Sequence[Path], range_bytes: int, units: Callable[[Path], int]) -> Iterator[FileRange]:
    """The ranges of the files: in their order, the documents of the files in theirs.

    Args:
      range_bytes: files are cut, or put together, so that a range has about this many bytes of them.
      units: the number of units of a file; 1 for one that cannot be cut.
    """
    together: list[Path] = []
    num_bytes = 0
    for path in files:
        size = path.stat().st_size
        if together and num_bytes + size > range_bytes:
            yield FileRange(tuple(together))
            together, num_bytes = [], 0
        if size > range_bytes and (num_units := units(path)) > 1:
            num = min(-(-size // range_bytes), num_units)
            bounds = [i * num_units // num for i in range(num)]
            yield from (FileRange((path,), *ends) for ends in zip(bounds, [*bounds[1:], None], strict=True))
        else:
            together.append(path)
            num_bytes += size
    if together:
        yield FileRange(tuple(together))
