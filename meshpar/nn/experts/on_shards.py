"""Computes experts of whole arrays on local shards, where GSPMD or the partitioner shards the rest of a program."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from meshpar.parallel.context import ParallelContext, tracing
from meshpar.parallel.outputs import Auxiliary, Sum

Computed = tuple[jax.Array, Auxiliary]


def on_shards(
    compute: Callable[..., Computed], ctx: ParallelContext, x_BRD: Float[Array, "B R D"], targets_BS: Int[Array, "B S"],
    params: Sequence[jax.Array], dims: Sequence[Sequence[str]],
) -> Computed:  # fmt: skip
    """Computes `compute(x, targets, *params)`, a function of local shards, in a manual region.

    Args:
      dims: the names of each parameter's dims.

    Returns:
      float [batch, seq, embed], and losses and metrics as a `Sum` over all tokens of this call that count.

    Communication: that of `compute`; and all-gathers of parameters over axes that shard neither tokens nor `mlp`. Each
      device returns sums over its own tokens.
    """
    rows = PartitionSpec(ctx.axes("batch"), ctx.residual_axes)
    tokens = ctx.axes("batch") + ctx.axes("seq")

    def local(x: jax.Array, targets: jax.Array, *copies: jax.Array) -> Computed:
        with tracing(replace(ctx, manual=True, is_planned=False)):
            y, auxiliary = compute(x, targets, *(jnp.squeeze(own, 0) for own in copies))
        count = (targets >= 0).sum(dtype=jnp.int32)
        return y, jax.tree.map(lambda mean: (mean * count.astype(mean.dtype))[None], auxiliary)

    def copied(param: jax.Array, dims: Sequence[str]) -> tuple[jax.Array, PartitionSpec]:
        """A copy for each device with other tokens, so that a gradient is that of its own until the step sums it."""
        axes = [ctx.dispatch(dim) + (ctx.axes(dim) if dim == "mlp" else ()) for dim in dims]
        splitting = ctx.axes("batch") + ctx.residual_axes
        others = tuple(axis for axis in splitting if not any(axis in over for over in axes))
        num = math.prod(ctx.mesh.shape[axis] for axis in others)
        return jnp.broadcast_to(param, (num, *param.shape)), PartitionSpec(others, *axes)

    copies, specs = zip(*map(copied, params, dims), strict=True)
    in_specs = (rows, ctx.pspec("batch", "seq"), *specs)
    region: Any = jax.shard_map(local, mesh=ctx.mesh, in_specs=in_specs, out_specs=(rows, PartitionSpec(tokens)))
    y, sums = region(x_BRD, targets_BS, *copies)
    return y, Auxiliary(*({name: Sum(jnp.moveaxis(x, 0, -1)) for name, x in scalars.items()} for scalars in sums))
