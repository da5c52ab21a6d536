"""Places the cache of keys and values by the same rules as the heads that fill it."""

from __future__ import annotations

import jax
import numpy as np

from meshpar.nn.attention.cached import CACHE_DIMS, KVCache
from meshpar.nn.transformer import Decoder
from meshpar.parallel.context import ParallelContext
from meshpar.sharding.resolve import Placement
from meshpar.sharding.spec import ArraySpec


def cache_placement(model: Decoder, ctx: ParallelContext, num_rows: int, num_slots: int) -> KVCache:
    """Places a cache, in the dtype of the computation.

    Args:
      num_rows: a multiple of the batch's shards.
      num_slots: tokens per row, prompt and answer together.

    Returns:
      A `KVCache` of `Placement`s.

    Memory: 2 layers rows slots kv_heads head_dim elements on all devices together; each holds its rows and heads.
    """
    shape = (model.num_layers, num_rows, num_slots, model.kv_heads, model.head_size)
    spec = ArraySpec(shape, np.dtype(ctx.compute_dtype), CACHE_DIMS)
    axes = tuple(ctx.axes(dim) for dim in spec.dims)
    reason = tuple(f"{dim} -> {', '.join(ctx.rules[dim]) or '[]'}   ({ctx.rules.source(dim)})" for dim in spec.dims)
    placed = Placement(spec, ctx.mesh, axes, reason)
    return KVCache(placed, placed)  # pyright: ignore[reportArgumentType]


def device_bytes(placed: KVCache) -> int:
    """Bytes of the cache on one device."""
    return sum(placement.local_bytes for placement in jax.tree.leaves(placed))
