"""Tables of the block pairs that attention computes: which block of queries meets which block of keys, in which order.

A pair without a visible token is not in the table, so that it costs nothing, forward or backward. The tables are
NumPy arrays and need no devices; `online_softmax` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class BlockGrid:
    """Cuts a sequence into blocks of one size.

    If no such size divides the sequence, the last block overlaps the one before it, and a mask excludes the tokens
    that belong to the other. So nothing is padded.

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

    def rows(self, pairs: np.ndarray) -> np.ndarray:
        """Converts block indices [pair, 2] to rows of a table.

        Returns:
          int32[pair, 4]: for queries and for keys the first token that the pair reads, then for both the first token
          that belongs to the block. The two differ only for the last block of a ragged grid.
        """
        return np.concatenate([self.start(pairs), pairs * self.size], axis=1).astype(np.int32)


def causal_pairs(num_blocks: int) -> np.ndarray:
    """All pairs in which some key is not after its query: int64[pair, 2] (block of queries, block of keys).

    The pairs of one query block follow each other. The first of them contains each query's own key, so that the
    softmax has a finite maximum from the start.

    >>> causal_pairs(3).tolist()
    [[0, 0], [1, 1], [1, 0], [2, 2], [2, 1], [2, 0]]
    """
    return np.array([(q, k) for q in range(num_blocks) for k in range(q, -1, -1)])


def within_window(pairs: np.ndarray, size: int, window: Any) -> np.ndarray:
    """The pairs of blocks of `size` tokens in which some query attends to some key, if it attends to `window` tokens.

    >>> within_window(causal_pairs(3), 128, window=100).tolist()
    [[0, 0], [1, 1], [1, 0], [2, 2], [2, 1]]
    """
    if not isinstance(window, int):  # no window, or one that only the device knows
        return pairs
    nearest = (pairs[:, 0] - pairs[:, 1]) * size - (size - 1)
    return pairs[nearest < window]
