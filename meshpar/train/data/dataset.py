"""Batches by index: batch i is a function of config, seed and i, and of nothing else."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from meshpar.train.data.packing import Batch, Rows
from meshpar.train.data.turns import Turns


@dataclass(frozen=True)
class Dataset:
    """Batches by index: to resume at step k, on whatever devices and processes, is to start at k.

    Args:
      parts: what the batches are made of.
      batch_size: rows a batch, over all devices.
      seed: the parts take turns by their weights, without end, and the rows of each are ordered anew for each of
        its epochs; None reads the parts once, one after the other, and fills the last batch with rows of padding.
      weights: of each part, in whole numbers.
    """

    parts: tuple[Rows, ...]
    batch_size: int
    seed: int | None
    weights: tuple[int, ...] = (1,)

    @property
    def num_documents(self) -> int:
        return sum(len(part.documents) for part in self.parts)

    @property
    def num_tokens(self) -> int:
        """Tokens of all parts, with those that open a document, and without padding."""
        return sum(part.documents.num_tokens for part in self.parts)

    @property
    def num_rows(self) -> int:
        """Rows of all parts. An epoch may end within a batch; the next begins there."""
        return sum(map(len, self.parts))

    def __len__(self) -> int:
        """The number of batches; with a seed, more than a run can read."""
        return -(-self.num_rows // self.batch_size) if self.seed is None else 2**62 // self.batch_size

    def __getitem__(self, index: int) -> Batch:
        """Batch `index`, see `Rows.batch`.

        Raises:
          IndexError: it is negative, or at or beyond the length.
        """
        return self.rows(index, np.arange(self.batch_size))

    def __iter__(self) -> Generator[Batch, None, None]:
        return self.batches()

    def rows(self, index: int, rows: ArrayLike) -> Batch:
        """These rows int[n] of batch `index`; no others are read."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        part, row = self._places(index * self.batch_size + np.asarray(rows))
        if len(self.parts) == 1:
            return self.parts[0].batch(row)
        cut = [(part == p, rows.batch(row[part == p])) for p, rows in enumerate(self.parts)]
        return {name: _merge([(here, batch[name]) for here, batch in cut]) for name in cut[0][1]}

    def batches(self, start: int = 0, rows: ArrayLike | None = None) -> Generator[Batch, None, None]:
        """Batches from `start` on, read ahead by two threads.

        They end with the generator: when it is exhausted, closed or dropped.

        Args:
          rows: int[n]. Which rows of each batch; default: all.
        """
        import grain

        chosen = np.arange(self.batch_size) if rows is None else np.asarray(rows)
        reads = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
        indices = grain.MapDataset.range(start, len(self)) if start < len(self) else grain.MapDataset.source([])
        iterator = iter(indices.map(lambda index: self.rows(index, chosen)).to_iter_dataset(reads))
        try:
            yield from iterator
        finally:
            iterator.close()

    def _places(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The part, and the row in it, of each place int64[n] in the line of all batches."""
        if self.seed is None:
            ends = np.cumsum([len(part) for part in self.parts])
            part = np.searchsorted(ends, at, side="right").clip(max=len(ends) - 1)
            return part, at - (ends[part] - [len(self.parts[p]) for p in part])
        part, turn = self._turns.of(at)
        return part, np.array([self._orders[p][int(t)] for p, t in zip(part, turn, strict=True)], np.int64)

    @cached_property
    def _turns(self) -> Turns:
        return Turns(self.weights)

    @cached_property
    def _orders(self) -> list[Any]:
        """Of each part, turn -> row, by Grain, which holds no permutation in memory."""
        import grain

        # Grain adds the epoch to the seed: as it stands, seeds 0 and 1 would share all orders but one.
        seeds = np.random.SeedSequence(self.seed).generate_state(len(self.parts))
        ranges = [grain.MapDataset.range(len(part)) for part in self.parts]
        return [rows.shuffle(seed=int(seed)).repeat() for rows, seed in zip(ranges, seeds, strict=True)]


def _merge(pieces: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """One array of the rows that stand where each mask says."""
    merged = np.empty((len(pieces[0][0]), *pieces[0][1].shape[1:]), pieces[0][1].dtype)
    for here, rows in pieces:
        merged[here] = rows
    return merged
