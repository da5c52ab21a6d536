"""Attention of rows that are sharded over devices: context parallelism, as `parallel.context` declares it.

Shapes: B batch, S seq, H heads, K kv_heads, h head_dim, local shards in the manual lowering.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
from jax import lax
from jaxtyping import Array, Float

from meshpar.errors import Problems
from meshpar.mesh.varying import Axes
from meshpar.nn.attention.blocks import in_blocks
from meshpar.nn.attention.core import Core, Documents, Window, documents, known_window
from meshpar.nn.attention.exchange import Exchange, Zigzag, heads_and_group
from meshpar.nn.attention.kernel import Kernel
from meshpar.nn.attention.shards import Shards
from meshpar.nn.attention.tables import BlockGrid, ShardTables
from meshpar.parallel.checks import check_pairs
from meshpar.parallel.context import ParallelContext, current, manual
from meshpar.parallel.sequence import SEQ, SequenceLayout
from meshpar.parallel.strategies import Parallel
from meshpar.partition.op import apply
from meshpar.partition.signature import Call, Signature


def across_shards(
    planning: ParallelContext, core: Core, q: Float[Array, "B S H h"], k: Float[Array, "B S K h"],
    v: Float[Array, "B S K h"], segments: Any, window: Window,
) -> Float[Array, "B S H h"]:  # fmt: skip
    """Attention of whole arrays as one operation, which is partitioned over rows, tokens and heads.

    Communication: that of `Shards.visit_all` or `Exchange`, as `parallel.context` selects.
    """
    is_layered = isinstance(window, jax.Array)

    def compute(call: Call, q: jax.Array, k: jax.Array, v: jax.Array, *more: jax.Array) -> list[jax.Array]:
        left = iter(more)
        document = None if segments is None else next(left)
        width = next(left) if is_layered else window
        tokens = call.axes("tokens")
        if tokens and (ctx := manual()):
            return [over_axes(core, q, k, v, document, width, tokens, ctx.sequence)]
        return [core(q, k, v, document, width)]

    of_token = ("rows", "tokens")
    of_heads = (*of_token, "heads", None)
    given = [(segments, of_token)] * (segments is not None) + [(window, ())] * is_layered
    # Where rows are whole, the axes of `residual_seq` shard only what is projected.
    whole = () if planning.axes("seq") else ("tokens",)
    signature = Signature((of_heads,) * 3 + tuple(labels for _, labels in given), (of_heads,), compute, whole=whole)
    return apply(signature, q, k, v, *(x for x, _ in given))[0]


def over_axes(
    core: Core, q: Float[Array, "B S H h"], k: Float[Array, "B T K h"], v: Float[Array, "B T K h"],
    segments: Any, window: Window, axes: Axes, layout: SequenceLayout, is_causal: bool = True, cap: float | None = None,
) -> Float[Array, "B S H h"]:  # fmt: skip
    """Attention of rows that are sharded over `axes`, in this layout, as `parallel.context` declares it.

    Args:
      segments: as `Core` gets them; or `Documents`.
      cap: see `Shards`.
    """
    ctx = current()
    context = (ctx.parallel if ctx else Parallel()).attention
    num_devices = math.prod(map(lax.axis_size, axes))
    group = context.exchange(num_devices)
    exchange = Exchange(axes, num_devices, group)
    segments = jax.tree.map(exchange.whole, segments)
    q, k, v = exchange.to_heads(q, k, v)
    if layout.num_shards == 1 and is_causal and cap is None and not isinstance(segments, Documents):
        out = core(q, k, v, segments, window)
    else:
        tables = _tables(core, layout, q.shape[SEQ], window, None if is_causal else k.shape[SEQ])
        shards = Shards(tables, axes, group, _way(context.kind, ctx), cap)
        out = in_blocks(shards, q, k, v, documents(segments, q, k), window)
    return exchange.to_tokens(out)


def over_consecutive(
    core: Core, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, window: int | None, axes: Axes, causal: bool,
    cap: float | None,
) -> jax.Array:  # fmt: skip
    """Attention of rows whose shards hold consecutive tokens, as a model of the user's own has them.

    Its positions and shifts need this order, so that only attention has the tokens in the zigzag layout.
    """
    ctx = current()
    context = (ctx.parallel if ctx else Parallel()).attention
    num_devices = math.prod(map(lax.axis_size, axes))
    rings = num_devices // context.exchange(num_devices)
    in_stages = ctx is not None and ctx.schedule is not None  # the zigzag layout takes permutes, which stages cannot
    is_zigzag = context.arranged(num_devices).is_zigzag and not in_stages and q.shape[SEQ] % 2 == 0
    if not (causal and rings == num_devices > 1 and is_zigzag):
        return over_axes(core, q, k, v, segments, window, axes, SequenceLayout(rings), is_causal=causal, cap=cap)
    order = Zigzag(axes, num_devices)
    q, k, v, segments = jax.tree.map(order.arranged, (q, k, v, segments))
    out = over_axes(core, q, k, v, segments, window, axes, SequenceLayout(rings, is_zigzag=True), cap=cap)
    return order.restored(out)


def _way(kind: str, ctx: ParallelContext | None) -> Literal["ring", "pairs", "gather"]:
    """How the keys travel. The permutes of a ring need all devices, and stages work at different times."""
    if kind == "all_gather":
        return "gather"
    return "pairs" if ctx and ctx.schedule else "ring"


def check(core: Core, num_heads: int, ctx: ParallelContext, problems: Problems) -> None:
    """Reports why devices cannot share the rows of a model with this core and `num_heads` query heads."""
    num_devices = ctx.row_shards
    if num_devices == 1:
        return
    context = ctx.parallel.attention
    group = context.exchange(num_devices)
    heads = num_heads // ctx.shards("heads")
    if num_devices % group:
        groups = [size for size in range(2, num_devices + 1) if num_devices % size == 0]
        fix = f"parallel.context.group={min(groups, key=lambda size: abs(size - group))}"
        what = f"the {num_devices} devices that share a row cannot be divided into groups of {group}"
        problems.add("parallel.context.group", what, fix)
    elif heads % group:
        problems.add("parallel.context", *heads_and_group(heads, group))
    if isinstance(core, Kernel) and ctx.sequence.num_shards > 1:
        what = f"{core.kind} needs whole rows, but {context.kind} computes attention in blocks of a row"
        problems.add("model.attention", what, "model.attention=auto, or parallel.context=ulysses")
    check_pairs(ctx, problems)


def describe(core: Core, num_heads: int, ctx: ParallelContext, seq_len: int, window: Window) -> str:
    """How devices share rows of `seq_len` tokens; empty if they do not."""
    num_devices = ctx.row_shards
    if num_devices == 1:
        return ""
    context = ctx.parallel.attention
    group = context.exchange(num_devices)
    heads = num_heads // ctx.shards("heads")
    tokens = seq_len // num_devices
    exchange = f"{group} devices exchange {tokens} tokens for {heads // group} of {heads} heads"
    if ctx.sequence.num_shards == 1:
        return f"ulysses: {exchange}"
    tables = _tables(core, ctx.sequence, tokens * group, window)
    order = "zigzag" if ctx.sequence.is_zigzag else "contiguous"
    if context.kind == "all_gather":
        how = f"all_gather, {order}: a device gathers the keys and values of {num_devices} x {tokens} tokens"
    else:
        hops = f"{len(tables.hops)} hop{'s' if len(tables.hops) > 1 else ''}"
        how = f"{context.kind}, {order}: the keys and values of {tokens * group} tokens "
        how += "are exchanged by one pair of devices after the other" if ctx.schedule else f"travel {hops}"
        how += f", after {exchange}" if group > 1 else ""
    share = tables.needed * int(tables.scores.sum()) / len(tables.scores)
    most = float(int(tables.scores.max()) / share)
    return f"{how}; the busiest device computes {most:.2f} times an equal share of the needed scores"


def _tables(
    core: Core, layout: SequenceLayout, tokens: int, window: Window, num_keys: int | None = None
) -> ShardTables:
    """The tables for shards of `tokens` tokens. A core without blocks computes chunks whole.

    Args:
      num_keys: the keys of a shard, to all of which its queries attend; None for causal attention.
    """

    def grid(tokens: int) -> BlockGrid:
        length = tokens // layout.chunks.shape[1]
        return BlockGrid(length, getattr(core, "block_size", length))

    keys = None if num_keys is None else grid(num_keys)
    return ShardTables(layout, grid(tokens), known_window(window), num_keys is None, keys)
