"""Shuffles rows that are read in blocks, such as row groups of Parquet, so that each block is read about once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

WINDOW = 8
"""Blocks whose rows are shuffled together."""


@dataclass(frozen=True, eq=False)
class BlockOrder:
    """An endless sequence of rows: in each epoch the blocks are shuffled, and then the rows of each `WINDOW` of them.

    Args:
      ends: int64[n + 1], where each block begins, and the number of rows.

    >>> order = BlockOrder(np.array([0, 3, 5, 9]), seed=0)
    >>> [order[i] for i in range(9)], sorted(order[i] for i in range(9, 18))
    ([1, 6, 2, 8, 0, 3, 4, 7, 5], [0, 1, 2, 3, 4, 5, 6, 7, 8])
    """

    ends: np.ndarray
    seed: int

    def __getitem__(self, at: int) -> int:
        epoch, place = divmod(int(at), int(self.ends[-1]))
        ends = self._blocks(epoch)[1]
        window = int(np.searchsorted(ends[WINDOW::WINDOW], place, side="right"))
        return int(self._window(epoch, window)[place - int(ends[window * WINDOW])])

    @cached_property
    def _blocks(self) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
        """Epoch -> its order of blocks, and where each of them begins in this order."""

        def of_epoch(epoch: int) -> tuple[np.ndarray, np.ndarray]:
            order = self._draw(epoch).permutation(len(self.ends) - 1)
            return order, np.cumsum([0, *np.diff(self.ends)[order]])

        return lru_cache(2)(of_epoch)

    @cached_property
    def _window(self) -> Callable[[int, int], np.ndarray]:
        """(epoch, window) -> its rows."""

        def of_window(epoch: int, window: int) -> np.ndarray:
            blocks = self._blocks(epoch)[0][window * WINDOW : (window + 1) * WINDOW]
            bounds = ((int(self.ends[block]), int(self.ends[block + 1])) for block in blocks)
            rows = np.concatenate([np.arange(begin, end) for begin, end in bounds])
            return self._draw(epoch, window + 1).permutation(rows)

        return lru_cache(4)(of_window)

    def _draw(self, *which: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, *which))
