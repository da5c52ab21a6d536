"""The keys and values of the tokens so far, so that a new token computes none of theirs again.

A token lies in the slot of its position. So the cache knows no lengths and no padding: rows end where they end,
and a token sees the slots up to its own. What padding behind a short prompt leaves in later slots is seen by no one,
for each is overwritten by the token of its position before any token can see it.

Shapes: N layers, B batch, T slots, S new tokens, K kv_heads, h head_dim (local shards in the manual lowering).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshpar.parallel.context import constrain

CACHE_DIMS = ("layers", "batch", "seq", "kv_heads", "head_dim")

_ROW_BY_ROW = jax.lax.ScatterDimensionNumbers(
    # An index is (layer, position). Rows are named as a batch, so that GSPMD sees that they do not mix.
    operand_batching_dims=(1,), scatter_indices_batching_dims=(0,), scatter_dims_to_operand_dims=(0, 2),
    inserted_window_dims=(0, 2), update_window_dims=(2, 3),
)  # fmt: skip


class KVCache(NamedTuple):
    """Keys, turned by their positions already, and values; float[layers, batch, seq, kv_heads, head_dim]."""

    keys: Float[Array, "N B T K h"]
    values: Float[Array, "N B T K h"]


class CachedLayer(NamedTuple):
    """The cache as one layer sees it.

    Args:
      cache: of all layers, so that the scan over them carries one buffer and writes in place.
      index: int32[]. Which layer.
      positions: int32[batch, seq]. Of the new tokens, one after the other in each row.
    """

    cache: KVCache
    index: Int[Array, ""]
    positions: Int[Array, "B S"]

    def extend(self, k_BSKh: Float[Array, "B S K h"], v_BSKh: Float[Array, "B S K h"]) -> CachedLayer:
        """With the new tokens' keys and values."""
        return self._replace(cache=KVCache(self._put(self.cache.keys, k_BSKh), self._put(self.cache.values, v_BSKh)))

    @property
    def keys(self) -> Float[Array, "B T K h"]:
        return jax.lax.dynamic_index_in_dim(self.cache.keys, self.index, keepdims=False)

    @property
    def values(self) -> Float[Array, "B T K h"]:
        return jax.lax.dynamic_index_in_dim(self.cache.values, self.index, keepdims=False)

    def _put(
        self, all_NBTKh: Float[Array, "N B T K h"], new_BSKh: Float[Array, "B S K h"]
    ) -> Float[Array, "N B T K h"]:
        where_BS2 = jnp.stack([jnp.full_like(self.positions, self.index), self.positions], axis=-1)
        written = jax.lax.scatter(all_NBTKh, where_BS2, new_BSKh.astype(all_NBTKh.dtype), _ROW_BY_ROW, mode="clip")
        return constrain(written, *CACHE_DIMS)
