"""Where the cache of keys and values lies: by the same rules as the heads that fill it."""

from __future__ import annotations

import jax
import numpy as np

from meshpar.nn.attention.cached import CACHE_DIMS, KVCache
from meshpar.nn.transformer import Decoder
from meshpar.sharding.constrain import Lowering
from meshpar.sharding.resolve import Placement
from meshpar.sharding.spec import ArraySpec


def cache_placement(model: Decoder, how: Lowering, num_rows: int, num_slots: int) -> KVCache:
    """Places a cache, in the dtype of the computation.

    Args:
      num_rows: a multiple of the batch's shards.
      num_slots: tokens a row, prompt and answer together.

    Returns:
      A `KVCache` of `Placement`s.

    Memory: 2 layers rows slots kv_heads head_dim elements over all devices; a device holds its rows and its heads.
    """
    shape = (model.num_layers, num_rows, num_slots, model.kv_heads, model.head_size)
    spec = ArraySpec(shape, np.dtype(how.dtype), CACHE_DIMS)
    axes = tuple(how.axes(dim) for dim in spec.dims)
    reason = tuple(f"{dim} -> {', '.join(how.rules[dim]) or '[]'}   ({how.rules.source(dim)})" for dim in spec.dims)
    placed = Placement(spec, how.mesh, axes, reason)
    return KVCache(placed, placed)  # pyright: ignore[reportArgumentType]


def device_bytes(placed: KVCache) -> int:
    """Bytes of the cache on one device."""
    return sum(one.local_bytes for one in jax.tree.leaves(placed))
