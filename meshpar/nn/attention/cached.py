"""The attention core of generation: it caches keys and values, so that earlier tokens are not computed again.

A token is stored in the slot of its position, and a query attends to the slots up to its own position. So the cache
needs neither lengths nor a padding mask: a slot that holds padding of a short prompt is overwritten by the token of
that position before any query attends to it.

Shapes: N layers, B batch, T slots, S new tokens, K kv_heads, H heads, h head_dim (local shards in the manual lowering).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshpar.nn.attention.core import Core, Window, causal_window, local_key_heads
from meshpar.nn.attention.kernel import for_prompts
from meshpar.nn.attention.reference import dot_product_attention
from meshpar.nn.supported import Sharding, Supported
from meshpar.parallel.context import constrain

CACHE_DIMS = ("layers", "batch", "seq", "kv_heads", "head_dim")

_ROW_BY_ROW = jax.lax.ScatterDimensionNumbers(
    # An index is (layer, position). Rows are declared as batch dims, so that GSPMD can shard them.
    operand_batching_dims=(1,), scatter_indices_batching_dims=(0,), scatter_dims_to_operand_dims=(0, 2),
    inserted_window_dims=(0, 2), update_window_dims=(2, 3),
)  # fmt: skip


class KVCache(NamedTuple):
    """Keys (after rotary positions) and values: float[layers, batch, seq, kv_heads, head_dim]."""

    keys: Float[Array, "N B T K h"]
    values: Float[Array, "N B T K h"]

    def layer(self, index: Int[Array, ""], prompts: Core) -> CachedLayer:
        """The core of one layer, which computes prompts with another core."""
        return CachedLayer(self, index, prompts)


@dataclass(frozen=True)
class CachedLayer:
    """Writes the new tokens to the cache of one layer, and attends to all tokens in it.

    Several tokens per row are a prompt, which begins at position 0 and attends only to itself.

    Args:
      cache: the cache of all layers. The scan over layers carries it as one buffer, and writes in place.
      index: int32[]. The index of the layer.
      prompts: the core that computes prompts.
    """

    cache: KVCache
    index: Int[Array, ""]
    prompts: Core
    has_cache: ClassVar[bool] = True
    sharding: ClassVar[Sharding] = {
        "seq": Supported(partition=False, why="one token cannot be divided over devices"),
    }

    def __call__(
        self, q: Float[Array, "B S H h"], k: Float[Array, "B S K h"], v: Float[Array, "B S K h"],
        positions: Int[Array, "B S"], segments: None, window: Window,
    ) -> tuple[Float[Array, "B S H h"], KVCache]:  # fmt: skip
        cache = KVCache(self._put(self.cache.keys, k, positions), self._put(self.cache.values, v, positions))
        if q.shape[1] > 1:
            prompts = for_prompts(self.prompts, q, window)
            out, _ = prompts(q, local_key_heads(k, q), local_key_heads(v, q), positions, None, window)
            return out, cache
        keys = jax.lax.dynamic_index_in_dim(cache.keys, self.index, keepdims=False)
        values = jax.lax.dynamic_index_in_dim(cache.values, self.index, keepdims=False)
        slots = jnp.arange(keys.shape[1], dtype=jnp.int32)
        visible = causal_window(positions, slots, window)
        return dot_product_attention(q, local_key_heads(keys, q), local_key_heads(values, q), visible), cache

    def _put(
        self, all_NBTKh: Float[Array, "N B T K h"], new_BSKh: Float[Array, "B S K h"], positions: Int[Array, "B S"]
    ) -> Float[Array, "N B T K h"]:
        where_BS2 = jnp.stack([jnp.full_like(positions, self.index), positions], axis=-1)
        written = jax.lax.scatter(all_NBTKh, where_BS2, new_BSKh.astype(all_NBTKh.dtype), _ROW_BY_ROW, mode="clip")
        return constrain(written, *CACHE_DIMS)
