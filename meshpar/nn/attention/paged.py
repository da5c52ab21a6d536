"""The attention core of serving: keys and values are stored in pages, and each row has a table of its pages.

A page holds consecutive tokens. Rows of any length share a pool of pages, and rows with the same beginning can share
the pages of that beginning. As in `cached`, a token is stored in the slot of its position, and a query attends to the
slots up to its own position.

Devices that hold different rows have pages of their own: a dim of the arrays counts these shards, and the numbers in a
table are pages of the row's shard. Page 0 of a shard belongs to no row: rows without a request are stored there.

Shapes: D shards of the batch, N layers, P pages, s slots of a page, B batch, b = B / D, M pages of a row, T = M s slots
of a row, S new tokens, K kv_heads, H heads, h head_dim (local shards in the manual lowering).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from meshpar.nn.attention.core import Core, Window, causal_window, local_key_heads
from meshpar.nn.attention.reference import dot_product_attention
from meshpar.nn.supported import Sharding, Supported
from meshpar.parallel.context import constrain

PAGES_DIMS = ("batch", "layers", "seq", "seq", "kv_heads", "head_dim")


class PagedCache(NamedTuple):
    """Keys (after rotary positions) and values: float[shards, layers, pages, slots of a page, kv_heads, head_dim].

    Args:
      table: int32 [batch, pages of a row]. The pages of each row, in the order of its tokens.
    """

    keys: Float[Array, "D N P s K h"]
    values: Float[Array, "D N P s K h"]
    table: Int[Array, "B M"]

    def layer(self, index: Int[Array, ""], prompts: Core) -> PagedLayer:
        """The core of one layer. Prompts attend to the cache too, since it may contain their beginning."""
        return PagedLayer(self, index)


@dataclass(frozen=True)
class PagedLayer:
    """Writes the new tokens to the pages of one layer, and attends to all tokens of their row.

    Args:
      cache: the cache of all layers. The scan over layers carries it, and writes in place.
      index: int32[]. The index of the layer.

    Memory: the keys and values of one layer for T tokens of each row.

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
        keys = self._rows(cache.keys)
        slots = jnp.arange(keys.shape[1], dtype=jnp.int32)
        # Slots that no token of the row has filled may hold NaN of an earlier row, and 0 times NaN is NaN.
        is_filled = slots <= positions[:, -1:]
        values = jnp.where(is_filled[..., None, None], self._rows(cache.values), jnp.zeros((), v.dtype))
        visible = causal_window(positions, slots, window)
        return dot_product_attention(q, local_key_heads(keys, q), local_key_heads(values, q), visible), cache

    def _put(
        self, pages: Float[Array, "D N P s K h"], new_BSKh: Float[Array, "B S K h"], positions_BS: Int[Array, "B S"]
    ) -> Float[Array, "D N P s K h"]:
        num_shards, _, _, page_size, *_ = pages.shape
        page_BS = jnp.take_along_axis(
            self.cache.table, positions_BS // page_size, axis=1, mode="fill", fill_value=0
        )  # fmt: skip

        def put(pages: Float[Array, "N P s K h"], page_bS: jax.Array, slot_bS: jax.Array, new_bSKh: jax.Array):
            return pages.at[self.index, page_bS, slot_bS].set(new_bSKh, mode="promise_in_bounds")

        new = (page_BS, positions_BS % page_size, new_BSKh.astype(pages.dtype))
        written = jax.vmap(put)(pages, *(_by_shard(x, num_shards) for x in new))
        return constrain(written, *PAGES_DIMS)

    def _rows(self, pages: Float[Array, "D N P s K h"]) -> Float[Array, "B T K h"]:
        """The keys or values of each row, in the order of its tokens."""

        def rows(pages: Float[Array, "N P s K h"], table_bM: jax.Array) -> Float[Array, "b M s K h"]:
            return pages.at[self.index, table_bM].get(mode="promise_in_bounds")

        found = jax.vmap(rows)(pages, _by_shard(self.cache.table, pages.shape[0]))
        return found.reshape(len(self.cache.table), -1, *found.shape[-2:])


def _by_shard(x: Shaped[Array, "B *rest"], num_shards: int) -> Shaped[Array, "D b *rest"]:
    return x.reshape(num_shards, -1, *x.shape[1:])
