"""Batches by index: batch i is a function of the config, the seed, i and the rows that were read in other batches."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from meshpar.data.order import Order
from meshpar.data.packing import Batch
from meshpar.data.weights import FROM_ONE_PART, Phase
from meshpar.data.with_grain import read_ahead, shuffled


class Rows(Protocol):
    """Documents in rows of equal length, which are read on request."""

    @property
    def seq_len(self) -> int:
        """Tokens of a row."""
        ...

    @property
    def num_documents(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """The tokens of all documents, without padding."""
        ...

    def __len__(self) -> int: ...

    def batch(self, rows: ArrayLike) -> Batch:
        """See `PackedRows.batch`."""
        ...


@dataclass(frozen=True)
class Dataset:
    """Batches by index. A run resumes at step k, on any devices and processes, by starting at batch k of its `order`.

    Args:
      parts: the packed documents of each part of a mixture.
      batch_size: rows per batch, over all devices.
      seed: with a seed, the parts are interleaved by their weights without end, and the rows of a part are shuffled
        anew in each of its epochs. With None, the parts are read once, in order, and padding rows fill the last batch.
      phases: the weights of the parts, from a step on.
      first_rows: how many of the first rows of each part are read; None for all.
      order: which row is read when; a run that resumes with other batches has another one, see `order.resumed`.
    """

    parts: tuple[Rows, ...]
    batch_size: int
    seed: int | None
    phases: tuple[Phase, ...] = FROM_ONE_PART
    order: Order = field(default_factory=Order)
    first_rows: int | None = None

    @property
    def num_documents(self) -> int:
        return sum(part.num_documents for part in self.parts)

    @property
    def num_tokens(self) -> int:
        """The tokens of all parts, with one `bos` per document, and without padding."""
        return sum(part.num_tokens for part in self.parts)

    @property
    def num_rows(self) -> int:
        """The rows of all parts. An epoch may end in the middle of a batch, where the next epoch begins."""
        return sum(self._lengths)

    def __len__(self) -> int:
        """The number of batches; with a seed, more than a run can read."""
        return -(-self.num_rows // self.batch_size) if self.seed is None else 2**62 // self.batch_size

    def __getitem__(self, index: int) -> Batch:
        """Batch `index`, see `PackedRows.batch`.

        Raises:
          IndexError: the index is negative, or at or beyond the length.
        """
        return self.rows(index, np.arange(self.batch_size))

    def __iter__(self) -> Generator[Batch, None, None]:
        return self.batches()

    def rows(self, index: int, rows: ArrayLike) -> Batch:
        """The given rows int[n] of batch `index`; no other rows are read."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        part, row = self._places(self.order.first + index * self.batch_size + np.asarray(rows))
        batch: Batch = {}
        for p, packed in enumerate(self.parts):
            mask = part == p
            for name, array in packed.batch(row[mask]).items():
                batch.setdefault(name, np.empty((len(row), self.parts[0].seq_len), array.dtype))[mask] = array
        return batch

    def batches(self, start: int = 0, rows: ArrayLike | None = None) -> Generator[Batch, None, None]:
        """Iterates over the batches from `start` on; two threads read ahead.

        The threads end when the generator is exhausted, closed or dropped.

        Args:
          rows: int[n]. The rows of each batch to read; default: all.
        """
        chosen = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        return read_ahead(lambda index: self.rows(index, chosen), start, len(self))

    def in_order(self, order: Order) -> Dataset:
        """The same rows, each read when the order says."""
        return replace(self, order=order)

    def _places(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The part, and the row within the part, of each index int64[n] into the sequence of all rows."""
        if self.seed is None:
            lengths = np.array(self._lengths)
            ends = np.cumsum(lengths)
            part = np.searchsorted(ends, at, side="right").clip(max=len(ends) - 1)
            row = at - (ends[part] - lengths[part])
            padding = np.array([len(rows) for rows in self.parts])[part]
            return part, np.where(row < lengths[part], row, padding)
        part, turn = self.order.turns(self.phases, self.batch_size, at)
        whole, piece = np.divmod(turn, self.order.pieces)
        rows = np.array([self._orders[p][int(t)] for p, t in zip(part, whole, strict=True)], np.int64)
        return part, rows * self.order.pieces + piece

    @cached_property
    def _orders(self) -> list[Any]:
        """For each part, turn -> row."""
        return shuffled([-(-length // self.order.pieces) for length in self._lengths], self.seed or 0)

    @cached_property
    def _lengths(self) -> list[int]:
        """The number of rows that are read of each part."""
        return [len(part) if self.first_rows is None else min(len(part), self.first_rows) for part in self.parts]
