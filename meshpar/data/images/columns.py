"""Pictures in Parquet files: a column of bytes, or of Hugging Face's `{bytes, path}`, and one of labels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from meshpar.data.arrow import pyarrow, wrong_name
from meshpar.data.files import cut_off
from meshpar.data.images.files import integer
from meshpar.data.images.shards import PictureShard
from meshpar.errors import DataError
from meshpar.tree import human_bytes

GLOB = "**/*.parquet"
GROUPS_KEPT = 16
"""Row groups that each process keeps in memory."""
LARGEST_GROUP = 2**30
"""Bytes of a row group."""


@dataclass(frozen=True)
class PictureTable(PictureShard):
    """The pictures of a Parquet file, of which whole row groups are read.

    Args:
      ends: int64[groups + 1], the row with which each row group begins, and the number of rows.
      image, label: the names of the columns.
    """

    ends: np.ndarray
    image: str
    label: str

    @property
    def length(self) -> int:
        return int(self.ends[-1])

    @property
    def blocks(self) -> np.ndarray:
        return self.ends

    @property
    def signature(self) -> bytes:
        return self.path.name.encode() + self.ends.tobytes()

    def read(self, row: int) -> tuple[bytes, int]:
        group = int(np.searchsorted(self.ends, row, side="right")) - 1
        images, labels = _group(self.path, group, self.image, self.label)
        at = row - int(self.ends[group])
        cell = images[at].as_py()
        picture = cell["bytes"] if isinstance(cell, dict) else cell
        if picture is None:
            raise DataError(f"its {self.image} is null\n    remove the row, or store the bytes of the picture")
        return picture, integer(labels[at].as_py())


def open_table(path: Path, image: str, label: str) -> PictureTable:
    """Reads the end of a Parquet file.

    Raises:
      ValueError: see `files.opened`.
    """
    parquet = pyarrow("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            schema, about = file.schema_arrow, file.metadata
            groups = [about.row_group(i) for i in range(about.num_row_groups)]
    except (ValueError, OSError, pyarrow("pyarrow").ArrowException) as error:
        raise cut_off(f"is no whole Parquet file ({str(error).splitlines()[0]})") from None
    _check(schema, {"image_field": image, "label_field": label})
    largest = max((group.total_byte_size for group in groups), default=0)
    if largest > LARGEST_GROUP:
        what = f"a row group has {human_bytes(largest)}, of which each process keeps {GROUPS_KEPT} in memory"
        raise ValueError(what, "write it with row_group_size=100, as Hugging Face does for pictures")
    return PictureTable(path, np.cumsum([0, *(group.num_rows for group in groups)]), image, label)


def _check(schema: Any, columns: dict[str, str]) -> None:
    types = pyarrow("pyarrow.types")
    for key, name in columns.items():
        if wrong := wrong_name(schema, key, name):
            raise ValueError(*wrong)
        dtype = schema.field(name).type
        if types.is_struct(dtype) and dtype.get_field_index("bytes") >= 0:
            dtype = dtype.field("bytes").type
        of_bytes = types.is_binary(dtype) or types.is_large_binary(dtype)
        if not (of_bytes if key == "image_field" else types.is_integer(dtype)):
            wanted = "bytes of pictures" if key == "image_field" else "integers"
            raise ValueError(
                f"its column {name!r} is {dtype}, not {wanted}", f"data.{key} names the column of {wanted}"
            )


@lru_cache(GROUPS_KEPT)
def _group(path: Path, group: int, image: str, label: str) -> tuple[Any, Any]:
    with pyarrow("pyarrow.parquet").ParquetFile(path) as file:
        table = file.read_row_group(group, columns=[image, label], use_threads=False)
    return table.column(image).combine_chunks(), table.column(label)
