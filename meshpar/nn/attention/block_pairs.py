"""Tables of the pairs (block of queries, block of keys) that attention computes, in order.

A pair without a visible token is not in the table, so it costs nothing, forward or backward. The tables are NumPy
arrays and need no devices; `online_softmax` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True)
class BlockGrid:
    """Cuts a sequence into blocks of one size.

    If the size does not divide the sequence, the last block overlaps the block before it, and a mask excludes the
    tokens that belong to that block. Nothing is padded.

    Args:
      seq_len: the number of tokens.
      most: the largest block size allowed.

    >>> BlockGrid(1000, 128)
    BlockGrid(seq_len=1000, most=128)
    >>> BlockGrid(1000, 128).size, BlockGrid(1000, 128).num_blocks
    (125, 8)
    """

    seq_len: int
    most: int

    @property
    def num_blocks(self) -> int:
        return -(-self.seq_len // self.most)

    @property
    def size(self) -> int:
        """Tokens of a block."""
        return -(-self.seq_len // self.num_blocks)

    @property
    def is_ragged(self) -> bool:
        """Whether the last block overlaps the one before it."""
        return self.num_blocks * self.size != self.seq_len

    def start(self, block: np.ndarray) -> np.ndarray:
        """The index of the first token that each block reads."""
        return np.minimum(block * self.size, self.seq_len - self.size)


class Grids(NamedTuple):
    """The blocks of queries and those of keys, whose sequences may have different lengths.

    >>> Grids.of(BlockGrid(384, 128)).rows(np.array([[2, 1]])).tolist()
    [[256, 128, 256, 128]]
    """

    queries: BlockGrid
    keys: BlockGrid

    @classmethod
    def of(cls, grid: BlockGrid) -> Grids:
        """The same blocks for both."""
        return cls(grid, grid)

    @property
    def is_ragged(self) -> bool:
        return self.queries.is_ragged or self.keys.is_ragged

    def rows(self, pairs: np.ndarray, chunks: tuple[int, int] = (0, 0)) -> np.ndarray:
        """Converts block indices [pair, 2] to rows of a table.

        Args:
          chunks: which chunk of its array the queries are, and the keys, if the arrays contain several.

        Returns:
          int32[pair, 4]: for queries and for keys the first token that the pair reads, then for both the first token
          that belongs to the block. The two differ only for the last block of a ragged grid.
        """
        places = list(zip(self, pairs.T, chunks, strict=True))
        read = [grid.start(block) + chunk * grid.seq_len for grid, block, chunk in places]
        own = [block * grid.size + chunk * grid.seq_len for grid, block, chunk in places]
        return np.stack([*read, *own], axis=1).astype(np.int32)


def all_pairs(grids: Grids) -> np.ndarray:
    """All pairs of blocks, in the order of `visible_pairs`: int64[pair, 2]."""
    keys = range(grids.keys.num_blocks)
    return np.array([(q, k) for q in range(grids.queries.num_blocks) for k in reversed(keys)])


def visible_pairs(grid: BlockGrid, chunks_apart: int = 0, window: Any = None) -> np.ndarray:
    """All pairs of blocks in which some query attends to some key.

    The queries and the keys are chunks of one longer sequence; each chunk is divided by the grid. The pairs of a query
    block are consecutive, with the nearest keys first.

    Args:
      chunks_apart: by how many chunks the queries are after the keys.
      window: how many tokens a query attends to. Only an int excludes pairs: an array is known only on the device.

    Returns:
      int64[pair, 2] (block of queries, block of keys).

    >>> visible_pairs(BlockGrid(384, 128)).tolist()
    [[0, 0], [1, 1], [1, 0], [2, 2], [2, 1], [2, 0]]
    >>> visible_pairs(BlockGrid(384, 128), window=100).tolist()
    [[0, 0], [1, 1], [1, 0], [2, 2], [2, 1]]
    >>> visible_pairs(BlockGrid(384, 128), chunks_apart=1, window=100).tolist()
    [[0, 2]]
    """
    last = grid.num_blocks - 1
    before = chunks_apart * grid.num_blocks
    pairs = np.array([(q, k) for q in range(last + 1) for k in range(min(q + before, last), -1, -1)]).reshape(-1, 2)
    nearest = chunks_apart * grid.seq_len + (pairs[:, 0] - pairs[:, 1]) * grid.size - (grid.size - 1)
    return pairs[nearest < window] if isinstance(window, int) else pairs


def num_visible_pairs(grid: BlockGrid, window: Any = None) -> int:
    """How many pairs `visible_pairs` has, for rows of any length.

    >>> num_visible_pairs(BlockGrid(384, 128), window=100), num_visible_pairs(BlockGrid(2**31, 128))
    (5, 140737496743936)
    """
    blocks = grid.num_blocks
    distances = min(blocks, -(-(window + grid.size - 1) // grid.size)) if isinstance(window, int) else blocks
    return distances * blocks - distances * (distances - 1) // 2
