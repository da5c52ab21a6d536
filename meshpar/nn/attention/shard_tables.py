"""Tables of the block pairs that each device computes if rows are sharded: one table for each hop.

At hop h a device computes with the keys of the shard that is h places before its own. A table depends only on the
distance between queries and keys in chunks, so there are few different tables. They are NumPy arrays and need no
devices; `shards` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from meshpar.nn.attention.block_pairs import BlockGrid, Grids, all_pairs, visible_pairs
from meshpar.nn.attention.core import needed_scores
from meshpar.parallel.sequence import SequenceLayout

MANY_BLOCKS = 8
"""If a row on one device has at least this many blocks, the blocks on its diagonal are computed in halves."""


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
        for (q, k), distance in np.ndenumerate(apart):
            if not self.is_causal:
                rows.append(self.grids.rows(all_pairs(self.grids), (q, k)))
            elif distance >= 0:
                pairs = visible_pairs(self.grid, int(distance), self.window)
                on_diagonal = (pairs[:, 0] == pairs[:, 1]) & (distance == 0) & (self.halves is not None)
                rows.append(self.grids.rows(pairs[~on_diagonal], (q, k)))
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
        return np.concatenate([Grids.of(self.halves).rows(pairs, (block, block)) for block in blocks])

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
