"""Encoded pictures in several files as one sequence, whatever the format of the files is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from meshpar.errors import DataError


class PictureShard(Protocol):
    """The pictures of one file, or of one folder."""

    @property
    def length(self) -> int: ...

    @property
    def blocks(self) -> np.ndarray | None:
        """Rows that are read together: where each block begins, and the length; None if rows are read one by one."""
        ...

    @property
    def signature(self) -> bytes:
        """Changes if another picture is at some row, as far as names and sizes tell."""
        ...

    def read(self, row: int) -> tuple[bytes, int]:
        """The encoded picture and its class.

        Raises:
          DataError: they cannot be read.
        """
        ...

    def where(self, row: int) -> str:
        """Names a picture for messages."""
        ...


@dataclass(frozen=True)
class PictureShards:
    """All pictures by index: rows of `picture`, bytes, and `label`, an integer.

    Args:
      shards: their files.
      num_classes: labels are below it; None for any label.
    """

    shards: tuple[PictureShard, ...]
    num_classes: int | None = None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        shard, row = self._place(index)
        picture, label = shard.read(row)
        if self.num_classes is not None and not 0 <= label < self.num_classes:
            fix = f"data.num_classes={label + 1}" if label > 0 else "labels from 0 on"
            raise DataError(f"its label is {label}, and the classes are 0 to {self.num_classes - 1}\n    {fix}")
        return {"picture": picture, "label": label}

    def where(self, index: int) -> str:
        shard, row = self._place(index)
        return shard.where(row)

    @property
    def blocks(self) -> np.ndarray | None:
        """See `Indexed`; None if rows are read one by one."""
        begins = self._ends - [shard.length for shard in self.shards]
        of_shards = [
            shard.blocks[:-1] + begin
            for shard, begin in zip(self.shards, begins, strict=True)
            if shard.blocks is not None
        ]
        return np.concatenate([*of_shards, [len(self)]]) if len(of_shards) == len(self.shards) else None

    def _place(self, index: int) -> tuple[PictureShard, int]:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return self.shards[shard], index - int(self._ends[shard]) + self.shards[shard].length

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([shard.length for shard in self.shards])
