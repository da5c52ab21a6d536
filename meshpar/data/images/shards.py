"""Encoded pictures in several files as one sequence, whatever the format of the files is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from meshpar.errors import DataError


@dataclass(frozen=True)
class PictureShard(ABC):
    """The pictures of one file, or of one folder."""

    path: Path

    @property
    @abstractmethod
    def length(self) -> int: ...

    @property
    def blocks(self) -> np.ndarray | None:
        """Rows that are read together: where each block begins, and the length; None if rows are read one by one."""
        return None

    @property
    @abstractmethod
    def signature(self) -> bytes:
        """Changes if another picture is at some row, as far as names and sizes tell."""

    @abstractmethod
    def read(self, row: int) -> tuple[bytes, int]:
        """The encoded picture and its class.

        Raises:
          DataError: they cannot be read.
        """

    def where(self, row: int) -> str:
        """Names a picture for messages."""
        return f"{self.path}, row {row}"


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
        return int(self._begins[-1])

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
        of_shards = [shard.blocks for shard in self.shards]
        begins = zip(of_shards, self._begins.tolist(), strict=False)
        blocks = [of_shard[:-1] + begin for of_shard, begin in begins if of_shard is not None]
        return np.concatenate([*blocks, [len(self)]]) if len(blocks) == len(self.shards) else None

    def _place(self, index: int) -> tuple[PictureShard, int]:
        shard = int(np.searchsorted(self._begins, index, side="right")) - 1
        return self.shards[shard], index - int(self._begins[shard])

    @cached_property
    def _begins(self) -> np.ndarray:
        """int64[shards + 1], where each begins, and the number of pictures."""
        return np.cumsum([0, *(shard.length for shard in self.shards)])
