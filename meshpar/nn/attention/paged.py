"""The attention core of serving: keys and values are stored in pages, and each row has a table of its pages.

A page holds consecutive tokens. Rows of any length share a pool of pages, and rows with the same beginning can share
the pages of that beginning. As in `cached`, a token is stored in the slot of its position, and a query attends to the
slots up to its own position.

Devices that hold different rows have pages of their own: a dim of the arrays counts these shards, and the numbers in a
table are pages of the row's shard. Page 0 of a shard belongs to no row: rows without a request write there.

Shapes: D shards of the batch, N layers, P pages, s slots of a page, B batch, b = B / D, M pages of a row, n blocks of
m pages and t slots, S new tokens, K kv_heads, H heads, G = H / K, h head_dim (local shards in the manual lowering).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from meshpar.nn.attention.blocks import BLOCK_SIZE
from meshpar.nn.attention.codes import Stored, decoded, encoded
from meshpar.nn.attention.core import Core, Window, causal_window, local_key_heads
from meshpar.nn.attention.online_softmax import Softmax, empty, masked_scores
from meshpar.nn.supported import Sharding, Supported
from meshpar.parallel.context import constrain

PAGES_DIMS = ("batch", "layers", "seq", "seq", "kv_heads", "head_dim")


class PagedCache(NamedTuple):
    """Keys (after rotary positions) and values: [shards, layers, pages, slots of a page, kv_heads, head_dim].

    Args:
      table: int32 [batch, pages of a row]. The pages of each row, in the order of its tokens.
    """

    keys: Stored
    values: Stored
    table: Int[Array, "B M"]

    def layer(self, index: Int[Array, ""], prompts: Core) -> PagedLayer:
        """The core of one layer. Prompts attend to the cache too, since it may contain their beginning."""
        return PagedLayer(self, index)


@dataclass(frozen=True)
class PagedLayer:
    """Writes the new tokens to the pages of one layer, and attends to all tokens of their row, in blocks of pages.

    It computes as many blocks as the longest row on the device has.

    Args:
      cache: the cache of all layers. The scan over layers carries it, and writes in place.
      index: int32[]. The index of the layer.

    Memory: the keys and values of one layer for a block of each row.

    Source: Kwon et al. 2023 (PagedAttention), arXiv:2309.06180.
    """

    cache: PagedCache
    index: Int[Array, ""]
    has_cache: ClassVar[bool] = True
    sharding: ClassVar[Sharding] = {
        "seq": Supported(partition=False, why="one token cannot be divided over devices"),
    }

    def __call__(
        self, q: Float[Array, "B S H h"], k: Float[Array, "B S K h"], v: Float[Array, "B S K h"],
        positions: Int[Array, "B S"], segments: None, window: Window,
    ) -> tuple[Float[Array, "B S H h"], PagedCache]:  # fmt: skip
        table = self.cache.table
        cache = PagedCache(self._put(self.cache.keys, k, positions), self._put(self.cache.values, v, positions), table)
        page_size = _page_size(cache.keys)
        pages = max(1, BLOCK_SIZE // page_size)  # of a block
        num_slots = pages * page_size
        tables_Bnm = _blocks(table, pages)
        scaled = q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)

        def visit(block: Int[Array, ""], state: Softmax) -> Softmax:
            slots = block * num_slots + jnp.arange(num_slots, dtype=jnp.int32)
            table = tables_Bnm[:, block]
            keys = local_key_heads(self._rows(cache.keys, table), q)
            values = local_key_heads(self._rows(cache.values, table), q)
            # Slots that no token of the row has filled may hold NaN of an earlier row, and 0 times NaN is NaN.
            is_filled = slots <= positions[:, -1:]
            values = jnp.where(is_filled[..., None, None], values, jnp.zeros((), v.dtype))
            visible = causal_window(positions, slots, window)
            return state.with_keys(masked_scores(scaled, keys, visible), values)

        num_blocks = jnp.minimum(positions.max() // num_slots + 1, tables_Bnm.shape[1])
        return jax.lax.fori_loop(0, num_blocks, visit, empty(q)).result().astype(q.dtype), cache

    def _put(self, stored: Stored, new_BSKh: Float[Array, "B S K h"], positions_BS: Int[Array, "B S"]) -> Stored:
        page_size = _page_size(stored)
        page_BS = jnp.take_along_axis(
            self.cache.table, positions_BS // page_size, axis=1, mode="fill", fill_value=0
        )  # fmt: skip

        def put(pages: Shaped[Array, "N P s *rest"], page_bS: jax.Array, slot_bS: jax.Array, new_bS: jax.Array):
            return pages.at[self.index, page_bS, slot_bS].set(new_bS, mode="promise_in_bounds")

        def write(pages: Shaped[Array, "D N P s *rest"], new_BS: Shaped[Array, "B S *rest"]) -> jax.Array:
            new = (page_BS, positions_BS % page_size, new_BS)
            written = jax.vmap(put)(pages, *(_by_shard(x, len(pages)) for x in new))
            return constrain(written, *PAGES_DIMS[: written.ndim])

        return jax.tree.map(write, stored, encoded(new_BSKh, stored))

    def _rows(self, stored: Stored, table: Int[Array, "B m"]) -> Float[Array, "B t K h"]:
        """The keys or values in the pages of a table, in the order of their tokens."""

        def rows(pages: Shaped[Array, "N P s *rest"], table_bm: jax.Array) -> Shaped[Array, "b m s *rest"]:
            return pages.at[self.index, table_bm].get(mode="promise_in_bounds")

        def read(pages: Shaped[Array, "D N P s *rest"]) -> Shaped[Array, "B t *rest"]:
            found = jax.vmap(rows)(pages, _by_shard(table, len(pages)))
            return found.reshape(len(table), -1, *pages.shape[4:])

        return constrain(decoded(jax.tree.map(read, stored)), "batch", "seq", "kv_heads", "head_dim")


def _page_size(stored: Stored) -> int:
    return jax.tree.leaves(stored)[0].shape[3]


def _by_shard(x: Shaped[Array, "B *rest"], num_shards: int) -> Shaped[Array, "D b *rest"]:
    return x.reshape(num_shards, -1, *x.shape[1:])


def _blocks(table_BM: Int[Array, "B M"], num_pages: int) -> Int[Array, "B n m"]:
    """Tables of `num_pages` each. The last one is filled with page 0."""
    missing = -table_BM.shape[1] % num_pages
    return jnp.pad(table_BM, ((0, 0), (0, missing))).reshape(len(table_BM), -1, num_pages)
