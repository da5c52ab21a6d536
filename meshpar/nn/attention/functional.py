"""Attention as a function of arrays, for models of the user's own.

Shapes: B batch, S seq, H heads, K kv_heads, h head_dim.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meshpar.mesh.varying import Axes
from meshpar.nn.attention.auto import Auto
from meshpar.nn.attention.block_pairs import BlockGrid
from meshpar.nn.attention.blocks import BLOCK_SIZE, Blocks, in_blocks
from meshpar.nn.attention.context_parallel import in_order, over_axes
from meshpar.nn.attention.core import documents
from meshpar.nn.attention.shard_tables import ShardTables
from meshpar.nn.attention.shards import Shards
from meshpar.nn.attention.zigzag import Zigzag
from meshpar.parallel.context import current
from meshpar.parallel.sequence import SequenceLayout
from meshpar.parallel.strategies import Parallel
from meshpar.parallel.tensor import SEQ
from meshpar.partition.op import apply
from meshpar.partition.signature import Call, Signature


def attend(
    q: Float[Array, "B S H h"], k: Float[Array, "B S K h"], v: Float[Array, "B S K h"], *,
    causal: bool = True, window: int | None = None, segments: Int[Array, "B S"] | None = None,
    scale: float | None = None,
) -> Float[Array, "B S H h"]:  # fmt: skip
    """Attention of the tokens of a row to each other, by the core that is fastest on the platform.

    It never holds the scores of a whole row, and query heads may share key heads. Meshpar partitions it over batch and
    heads, and over tokens as `parallel.context` declares.

    Args:
      causal: whether a query attends only to tokens up to its own.
      window: how many tokens a query attends to, its own included; None for all up to its own.
      segments: the document of each token. A query attends to tokens of its own document.
      scale: of the scores. Default: `h ** -0.5`.

    Memory: see `Blocks`. Communication: see `Shards.meet`, if the tokens are sharded.

    Raises:
      ValueError: a window without `causal`; query heads that are no multiple of the key heads.

    >>> x = jnp.ones((1, 4, 2, 8))
    >>> attend(x, x, x).shape
    (1, 4, 2, 8)
    """
    if window is not None and not causal:
        raise ValueError(f"window={window}: a window is of earlier tokens; leave causal=True")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads cannot share {k.shape[2]} key heads; give a multiple of them")

    def compute(call: Call, q: Any, k: Any, v: Any, *segments: Any) -> list[jax.Array]:
        of_q = q.reshape(*q.shape[:2], -1, q.shape[-1])
        document = segments[0] if segments else None
        out = local_attention(
            of_q, k, v, causal=causal, window=window, segments=document, scale=scale, axes=call.axes("tokens")
        )
        return [out.reshape(q.shape)]

    groups = q.shape[2] // k.shape[2]
    grouped = q.reshape(*q.shape[:2], k.shape[2], groups, q.shape[3])
    of_keys = ("rows", "tokens", "heads", None)
    of_queries = ("rows", "tokens", "heads", "group", None)
    more = () if segments is None else (("rows", "tokens"),)
    signature = Signature((of_queries, of_keys, of_keys, *more), (of_queries,), compute)
    arrays = (grouped, k, v) if segments is None else (grouped, k, v, segments)
    return apply(signature, *arrays)[0].reshape(q.shape)


def local_attention(
    q: Float[Array, "B S H h"], k: Float[Array, "B S K h"], v: Float[Array, "B S K h"], *,
    causal: bool, window: int | None, segments: Any, scale: float | None, axes: Axes,
) -> Float[Array, "B S H h"]:  # fmt: skip
    """Attention of local shards.

    Args:
      axes: those over which the rows are sharded, in order.
    """
    usual = q.shape[-1] ** -0.5
    if scale is not None and not math.isclose(scale, usual, rel_tol=1e-6):
        q = q * jnp.asarray(scale / usual, q.dtype)
    core = Auto() if causal else Blocks()
    if axes:
        return _of_shards(core, q, k, v, segments, window, axes, causal)
    if causal:
        return core(q, k, v, in_order(q), segments, window)[0]
    tables = ShardTables(SequenceLayout(1), BlockGrid(q.shape[SEQ], BLOCK_SIZE), None, is_causal=False)
    return in_blocks(Shards(tables), q, k, v, documents(segments, q), None)


def _of_shards(
    core: Any, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, window: int | None, axes: Axes, causal: bool
) -> jax.Array:
    """Attention of rows whose shards hold consecutive tokens."""
    ctx = current()
    context = (ctx.parallel if ctx else Parallel()).attention
    num_devices = math.prod(map(lax.axis_size, axes))
    rings = num_devices // context.exchange(num_devices)
    if not (causal and rings == num_devices > 1 and context.arranged(num_devices).is_zigzag and _halves(q)):
        return over_axes(core, q, k, v, None, segments, window, axes, SequenceLayout(rings), is_causal=causal)
    order = Zigzag(axes, num_devices)
    q, k, v = map(order.arranged, (q, k, v))
    segments = None if segments is None else order.arranged(segments)
    out = over_axes(core, q, k, v, None, segments, window, axes, SequenceLayout(rings, is_zigzag=True))
    return order.restored(out)


def _halves(q: jax.Array) -> bool:
    return q.shape[SEQ] % 2 == 0
