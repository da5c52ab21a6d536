"""Pictures in tar files as WebDataset writes them: `0017.jpg` and `0017.cls` are one row. Nothing is extracted."""

from __future__ import annotations

import os
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshpar.data.images.decode import SUFFIXES
from meshpar.data.images.files import integer
from meshpar.data.images.shards import PictureShard
from meshpar.data.tars import members, named
from meshpar.errors import DataError
from meshpar.regular_files import open_regular

LONGEST_LABEL = 32
"""Bytes of a label."""


@dataclass(frozen=True)
class Tar(PictureShard):
    """The pictures of a tar file.

    Args:
      start, size: int64[n], where the bytes of each picture are.
      labels: int64[n].
    """

    start: np.ndarray
    size: np.ndarray
    labels: np.ndarray

    @property
    def length(self) -> int:
        return len(self.start)

    @property
    def signature(self) -> bytes:
        return self.path.name.encode() + b"".join(x.tobytes() for x in (self.start, self.size, self.labels))

    def read(self, row: int) -> tuple[bytes, int]:
        size = int(self.size[row])
        try:
            with open_regular(self.path) as file:
                content = os.pread(file.fileno(), size, int(self.start[row]))
        except OSError as error:
            raise DataError(f"it cannot be read: {error.strerror}") from None
        if len(content) < size:
            raise DataError("it is cut off: the file has become shorter since the run began")
        return content, int(self.labels[row])


def open_tar(path: Path, image: str | None, label: str) -> Tar:
    """Reads the headers of a tar file.

    Args:
      image: the suffix of the pictures, without a dot; None for that of any picture.
      label: the suffix of the labels.

    Raises:
      ValueError: see `files.opened`.
    """
    suffixes = SUFFIXES if image is None else (f".{image}",)
    with open_regular(path) as file:
        rows = _rows(file, suffixes, label)
    if lonely := [name for name, row in rows.items() if len(row) < 2]:
        has = "picture" if "image" in rows[lonely[0]] else "label"
        fix = "data.image_field and data.label_field are the suffixes of the two"
        raise ValueError(f"{lonely[0]!r} has a {has} only, as {len(lonely)} of {len(rows)} rows", fix)
    pictures = [(*row["image"], row["label"]) for row in rows.values()]
    start, size, labels = np.array(pictures, np.int64).reshape(-1, 3).T
    return Tar(path, start, size, labels)


def _rows(file, suffixes: tuple[str, ...], label: str) -> dict[str, dict]:
    """Name without suffix -> `image`, its place, and `label`."""
    rows: dict[str, dict] = {}
    for member in members(file):
        key, suffix = named(member)
        kind = "image" if f".{suffix.lower()}" in suffixes else "label" if suffix == label else None
        if kind is None:
            continue
        if kind in rows.setdefault(key, {}):
            raise ValueError(f"has two of {key}, {kind}", "a name of its own for each row")
        rows[key][kind] = (member.offset_data, member.size)
        if kind == "label":
            rows[key][kind] = _label(file, member)
    return rows


def _label(file, member: tarfile.TarInfo) -> int:
    text = os.pread(file.fileno(), min(member.size, LONGEST_LABEL), member.offset_data)
    try:
        return integer(text.decode(errors="replace").strip())
    except DataError as error:
        raise ValueError(*f"{member.name!r}: {error}".split("\n    ")) from None
