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
from jaxtyping import Array, Float, Int, Shaped

from meshpar.nn.attention.codes import Stored, decoded, encoded
from meshpar.nn.attention.core import Core, Window, causal_window, local_key_heads
from meshpar.nn.attention.kernel import for_prompts
from meshpar.nn.attention.reference import dot_product_attention
from meshpar.nn.supported import Sharding, Supported
from meshpar.parallel.context import constrain

CACHE_DIMS = ("layers", "batch", "seq", "kv_heads", "head_dim")


def _row_by_row(num_dims: int) -> jax.lax.ScatterDimensionNumbers:
    """The dims of a scatter that writes [batch, seq, ...] to slots. An index is (layer, position).

    Rows are declared as batch dims, so that GSPMD can shard them.
    """
    return jax.lax.ScatterDimensionNumbers(
        operand_batching_dims=(1,), scatter_indices_batching_dims=(0,), scatter_dims_to_operand_dims=(0, 2),
        inserted_window_dims=(0, 2), update_window_dims=tuple(range(2, num_dims)),
    )  # fmt: skip


class KVCache(NamedTuple):
    """Keys (after rotary positions) and values: [layers, batch, seq, kv_heads, head_dim], as floats or as codes."""

    keys: Stored
    values: Stored

    def layer(self, index: Int[Array, ""], prompts: Core) -> CachedLayer:
        """The core of one layer, which computes prompts with another core."""
        return CachedLayer(self, index, prompts)


class ContinuedCache(KVCache):
    """The same cache, for a program in which several tokens per row follow cached tokens."""

    def layer(self, index: Int[Array, ""], prompts: Core) -> CachedLayer:
        """The core of one layer, which computes no prompts."""
        return CachedLayer(self, index, None)


@dataclass(frozen=True)
class CachedLayer:
    """Writes the new tokens to the cache of one layer, and attends to all tokens in it.

    With `prompts`, several tokens per row are a prompt, which begins at position 0 and attends only to itself.

    Args:
      cache: the cache of all layers. The scan over layers carries it as one buffer, and writes in place.
      index: int32[]. The index of the layer.
      prompts: the core that computes prompts; None if several tokens per row follow cached tokens.
    """

    cache: KVCache
    index: Int[Array, ""]
    prompts: Core | None
    has_cache: ClassVar[bool] = True
    sharding: ClassVar[Sharding] = {
        "seq": Supported(partition=False, why="one token cannot be divided over devices"),
    }

    def __call__(
        self, q: Float[Array, "B S H h"], k: Float[Array, "B S K h"], v: Float[Array, "B S K h"],
        positions: Int[Array, "B S"], segments: None, window: Window,
    ) -> tuple[Float[Array, "B S H h"], KVCache]:  # fmt: skip
        keys = self._put(self.cache.keys, k, positions)
        cache = self.cache._replace(keys=keys, values=self._put(self.cache.values, v, positions))
        if q.shape[1] > 1 and self.prompts is not None:
            prompts = for_prompts(self.prompts, q, window)
            out, _ = prompts(q, local_key_heads(k, q), local_key_heads(v, q), positions, None, window)
            return out, cache
        keys = self._read(cache.keys)
        values = self._read(cache.values)
        slots = jnp.arange(keys.shape[1], dtype=jnp.int32)
        visible = causal_window(positions, slots, window)
        return dot_product_attention(q, local_key_heads(keys, q), local_key_heads(values, q), visible), cache

    def _put(self, stored: Stored, new_BSKh: Float[Array, "B S K h"], positions: Int[Array, "B S"]) -> Stored:
        return jax.tree.map(lambda old, new: self._write(old, new, positions), stored, encoded(new_BSKh, stored))

    def _write(
        self, all_NBT: Shaped[Array, "N B T *rest"], new_BS: Shaped[Array, "B S *rest"], positions: Int[Array, "B S"]
    ) -> Shaped[Array, "N B T *rest"]:
        where_BS2 = jnp.stack([jnp.full_like(positions, self.index), positions], axis=-1)
        how = _row_by_row(new_BS.ndim)
        written = jax.lax.scatter(all_NBT, where_BS2, new_BS, how, mode="clip")
        return constrain(written, *CACHE_DIMS[: written.ndim])

    def _read(self, stored: Stored) -> Float[Array, "B T K h"]:
        """The keys or values of this layer."""
        return decoded(jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, self.index, keepdims=False), stored))
