"""Tables of the pairs (block of queries, block of keys) that attention computes, in order.

A pair without a visible token is not in the table, so it costs nothing, forward or backward. If rows are sharded, there
is a table for each hop: at hop h a device computes with the keys of the shard that is h places before its own. A table
depends only on the distance between queries and keys in chunks, so there are few different ones. They are NumPy arrays
and need no devices; `online_softmax` and `shards` run them.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from meshpar.nn.attention.core import needed_scores
from meshpar.parallel.sequence import SequenceLayout

MANY_BLOCKS = 8
"""If a row on one device has at least this many blocks, the blocks on its diagonal are computed in halves."""


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

    >>> Grids(*[BlockGrid(384, 128)] * 2).rows(np.array([[2, 1]])).tolist()
    [[256, 128, 256, 128]]
    """

    queries: BlockGrid
    keys: BlockGrid

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


@dataclass(frozen=True)
class ShardTables:
    """The tables of all devices that share a row.

    Args:
      layout: which tokens each shard holds.
      grid: the blocks of a chunk.
      window: how many tokens a query attends to, if all layers agree; else None.
      is_causal: whether a query attends only to tokens up to its own; else to all.
      keys: the blocks of a chunk of keys, if they are tokens of another sequence.

    >>> tables = ShardTables(SequenceLayout(4, is_zigzag=True), BlockGrid(8, 4))
    >>> tables.hops, [len(table) for table in tables.tables]
    ([1, 2, 3], [8, 6, 8])
    >>> ShardTables(SequenceLayout(4), BlockGrid(8, 4), window=5).hops
    [1]
    """

    layout: SequenceLayout
    grid: BlockGrid
    window: int | None = None
    is_causal: bool = True
    keys: BlockGrid | None = None

    @property
    def grids(self) -> Grids:
        return Grids(self.grid, self.keys or self.grid)

    @cached_property
    def _apart(self) -> np.ndarray:
        """int[hop, shard, chunk of queries, chunk of keys]: how many chunks the queries are after the keys."""
        chunks = self.layout.chunks
        shard = np.arange(len(chunks))
        keys = chunks[(shard - shard[:, None]) % len(chunks)]
        if not self.is_causal:
            return np.zeros((len(chunks), *chunks.shape, chunks.shape[1]), int)
        # All distances of at least `far` give the same table, and so do all keys after the queries.
        far = 1 if self.window is None else -(-(self.window - 1) // self.grid.seq_len) + 1
        return np.clip(chunks[:, :, None] - keys[:, :, None, :], -1, far)

    @cached_property
    def which(self) -> np.ndarray:
        """int[hop, shard]: the index in `tables` of the table that a shard needs at a hop."""
        return self._different[1].reshape(self._apart.shape[:2])

    @cached_property
    def tables(self) -> list[np.ndarray]:
        """The different tables, int32[pair, 4], see `BlockGrid.rows`; empty where no query attends to a key."""
        return [self._table(apart) for apart in self._different[0]]

    @cached_property
    def _different(self) -> tuple[np.ndarray, np.ndarray]:
        chunks_each = self._apart.shape[2]
        rows, which = np.unique(self._apart.reshape(-1, chunks_each**2), axis=0, return_inverse=True)
        return rows.reshape(-1, chunks_each, chunks_each), which

    def _table(self, apart: np.ndarray) -> np.ndarray:
        rows = [np.empty((0, 4), np.int32)]
        for chunks, distance in np.ndenumerate(apart):
            if not self.is_causal:
                nearest_first = range(self.grids.keys.num_blocks - 1, -1, -1)
                pairs = np.array([(q, k) for q in range(self.grid.num_blocks) for k in nearest_first])
                rows.append(self.grids.rows(pairs, chunks))
            elif distance >= 0:
                pairs = visible_pairs(self.grid, int(distance), self.window)
                on_diagonal = (pairs[:, 0] == pairs[:, 1]) & (distance == 0) & (self.halves is not None)
                rows.append(self.grids.rows(pairs[~on_diagonal], chunks))
        return np.concatenate(rows)

    @cached_property
    def halves(self) -> BlockGrid | None:
        """Cuts the blocks on the diagonal in halves: only three of the four pairs of halves have a visible token.

        None for short rows on one device, which take more time on CPUs with a second loop over small blocks.
        """
        is_short = self.layout.num_shards == 1 and self.grid.num_blocks < MANY_BLOCKS
        if self.grid.is_ragged or is_short or not self.is_causal:
            return None
        return BlockGrid(self.grid.size, -(-self.grid.size // 2))

    @cached_property
    def diagonal(self) -> np.ndarray:
        """The table of the pairs of `halves`, for each block of queries and the same block of keys."""
        if self.halves is None:
            return np.empty((0, 4), np.int32)
        pairs = visible_pairs(self.halves, 0, self.window)
        blocks = range(self.layout.chunks.shape[1] * self.grid.num_blocks)
        return np.concatenate([Grids(self.halves, self.halves).rows(pairs, (block, block)) for block in blocks])

    @cached_property
    def hops(self) -> list[int]:
        """The hops at which some device attends to some key, without hop 0, a device's own shard."""
        lengths = self._lengths[1:].max(1, initial=0)
        return [hop for hop, length in enumerate(lengths, 1) if length]

    @cached_property
    def _lengths(self) -> np.ndarray:
        """int[hop, shard]: the rows of the table that a shard needs at a hop."""
        return np.array([len(table) for table in self.tables])[self.which]

    @cached_property
    def scores(self) -> np.ndarray:
        """int[shard]: the scores that each shard of queries computes, for each row and head."""
        halves = len(self.diagonal) * self.halves.size**2 if self.halves else 0
        return self._lengths.sum(0) * self.grid.size * self.grids.keys.size + halves

    @property
    def needed(self) -> Fraction:
        """The part of the computed scores that attention needs."""
        seq_len, num_keys = (grid.seq_len * self.layout.chunks.size for grid in self.grids)
        needed = needed_scores(seq_len, self.window) if self.is_causal else Fraction(seq_len * num_keys)
        return needed / int(self.scores.sum())

    def by_length(self, used: np.ndarray) -> dict[int, list[int]]:
        """Groups tables, given by their indices, by length: number of rows -> indices in `tables`."""
        found: dict[int, list[int]] = {}
        for index in np.unique(used):
            found.setdefault(len(self.tables[index]), []).append(int(index))
        return found
