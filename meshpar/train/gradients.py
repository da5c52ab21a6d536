"""Loss and gradients of one step, in three ways that must agree: on one device, manual, and under GSPMD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.parallel import data
from meshpar.parallel.local import varying, varying_like
from meshpar.parallel.pipeline.execute import Pipeline
from meshpar.parallel.precision import summed_in, wide
from meshpar.sharding.constrain import Lowering, lowering
from meshpar.sharding.resolve import sharding_axes
from meshpar.train.loss import Batch, Loss
from meshpar.train.state import StatePlacement


@dataclass(frozen=True)
class Objective:
    """What is minimized, and how a step goes about it; the same for every lowering.

    Args:
      loss: (params, batch, key) -> (sum, count).
      key: step -> the step's random key, or None where the model draws nothing.
      num_microbatches: how many parts the batch is computed in, one after the other.
      dtype: of the parameters in the computation; that of the state is its own.
      sums: in which gradients are summed over microbatches and devices; None for float32 at least.
      pipeline: how the manual lowering computes `loss` in stages; None where there are none.
    """

    loss: Loss
    key: Callable[[jax.Array], jax.Array | None] = lambda step: None
    num_microbatches: int = 1
    dtype: Any = jnp.float32
    sums: Any = None
    pipeline: Pipeline | None = None

    def cast(self, params: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(self.dtype), params)


@dataclass(frozen=True)
class Gradients:
    """What a step computes before the optimizer.

    Args:
      loss: f32[]. Mean over the real tokens of all devices and microbatches.
      tokens: int32[]. Their number.
      norm: f32[]. Of the whole gradient.
      grads: like the parameters, each sharded as `StatePlacement.sharded`.
    """

    loss: jax.Array
    tokens: jax.Array
    norm: jax.Array
    grads: Any


jax.tree_util.register_dataclass(Gradients, ["loss", "tokens", "norm", "grads"], [])


def auto(objective: Objective, how: Lowering | None) -> Callable[..., Gradients]:
    """(params, batch, step) -> `Gradients`, on global arrays: XLA chooses the collectives.

    Args:
      how: None on one device.
    """

    def gradients(params: Any, batch: Batch, step: jax.Array) -> Gradients:
        with lowering(how):
            total, tokens, grads = _accumulate(objective, objective.cast(params), batch, step)
        loss_mean, grads = _mean(total, tokens, grads)
        return Gradients(loss_mean, tokens, jnp.sqrt(sum(map(_square, jax.tree.leaves(grads)))), grads)

    return gradients


def manual(
    objective: Objective, how: Lowering, placement: StatePlacement, batch: dict[str, jax.ShapeDtypeStruct]
) -> Callable[..., Gradients]:
    """(params, batch, step) -> `Gradients`, in one `shard_map` over all axes: communication is what it says.

    Args:
      batch: the arrays of a batch, with shardings; without `rows`.

    Communication: that of `parallel.data` and `parallel.tensor`, and all-reduces of the scalars.
    """
    dims = jax.tree.map(lambda p: p.spec.dims, placement.sharded)
    pspecs = jax.tree.map(lambda p: p.pspec, placement.sharded)

    def local(params: Any, batch: Batch, step: jax.Array) -> Gradients:
        with lowering(how):
            entered = data.enter(params, dims)
            total, tokens, grads = _accumulate(objective, entered, batch, step)
            total, tokens = _psum((total, tokens), how.axes("batch") + how.axes("stage"))
            loss_mean, grads = _mean(total, tokens, data.reduce(grads, dims))
            return Gradients(loss_mean, tokens, _global_norm(grads, placement.sharded), grads)

    scalar = PartitionSpec()
    return jax.shard_map(
        local, mesh=how.mesh,
        in_specs=(jax.tree.map(lambda p: p.pspec, placement.params), batch_pspecs(how, batch), scalar),
        out_specs=Gradients(scalar, scalar, scalar, pspecs), check_vma=True,  # pyright: ignore
    )  # fmt: skip


def batch_pspecs(how: Lowering, batch: dict[str, jax.ShapeDtypeStruct]) -> dict[str, PartitionSpec]:
    """How the arrays of a batch are sharded, and the indices of its rows."""
    given = {name: struct.sharding.spec for name, struct in batch.items()}  # pyright: ignore
    return given | {"rows": PartitionSpec(how.axes("batch") or None)}


Sums = tuple[jax.Array, jax.Array, Any]


def _accumulate(objective: Objective, params: Any, batch: Batch, step: jax.Array) -> Sums:
    """Sums of losses, tokens and gradients over the microbatches."""

    def one(batch: Batch) -> Sums:
        if objective.pipeline:
            return objective.pipeline.gradients(params, batch, objective.key(step), objective.sums)
        gradients = jax.value_and_grad(objective.loss, has_aux=True)
        (total, tokens), grads = gradients(params, batch, objective.key(step))
        return total, tokens, jax.tree.map(lambda g: summed_in(g, objective.sums), grads)

    def add(sums: Sums, micro: Batch) -> tuple[Sums, None]:
        return jax.tree.map(jnp.add, sums, one(micro)), None

    num = objective.num_microbatches
    return one(batch) if num == 1 else lax.scan(add, _zeros(objective, params, batch), _microbatches(batch, num))[0]


def _zeros(objective: Objective, params: Any, batch: Batch) -> Sums:
    grads = jax.tree.map(lambda p: varying_like(jnp.zeros_like(summed_in(p, objective.sums)), p), params)
    total = wide(jnp.zeros((), jax.tree.leaves(params)[0].dtype))
    return varying_like(total, batch["rows"]), varying_like(jnp.int32(0), batch["rows"]), grads


def _microbatches(batch: Batch, num: int) -> Batch:
    """[batch, ...] -> [num, batch / num, ...], each device keeping the rows that it has."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] // num, num, *x.shape[1:]).swapaxes(0, 1), batch)


def _mean(total: jax.Array, tokens: jax.Array, grads: Any) -> tuple[jax.Array, Any]:
    count = jnp.maximum(tokens, 1).astype(total.dtype)
    return total / count, jax.tree.map(lambda g: g / count.astype(g.dtype), grads)


def _global_norm(grads: Any, placements: Any) -> jax.Array:
    """The norm of the whole gradient from local shards, those with copies counted in parts.

    Communication: an all-reduce of one scalar over every axis that shards a parameter.
    """
    placed = jax.tree.leaves(placements)
    axes = sharding_axes(placed)
    shares = [_square(g) / p.copies(axes) for g, p in zip(jax.tree.leaves(grads), placed, strict=True)]
    return jnp.sqrt(_psum(sum(varying(share, axes) for share in shares), axes))


def _psum(x: Any, axes: tuple[str, ...]) -> Any:
    return lax.psum(x, axes) if axes else x


def _square(x: jax.Array) -> jax.Array:
    return jnp.square(wide(x)).sum()
