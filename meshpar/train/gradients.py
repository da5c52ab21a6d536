"""Loss and gradients of one step, in three ways that must agree: on one device, manual, and under GSPMD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.parallel import data
from meshpar.parallel.local import varying, varying_like
from meshpar.parallel.precision import summed_in, wide
from meshpar.sharding.constrain import Lowering, lowering
from meshpar.sharding.resolve import sharding_axes
from meshpar.train.loss import Batch, Loss, Tally
from meshpar.train.state import StatePlacement


@dataclass(frozen=True)
class Objective:
    """What is minimized, and how a step goes about it; the same for every lowering.

    Args:
      loss: (params, batch, key, carried) -> `Tally`.
      key: step -> the step's random key, or None where the model draws nothing.
      num_microbatches: how many parts the batch is computed in, one after the other.
      dtype: of the parameters in the computation; that of the state is its own.
      sums: in which gradients are summed over microbatches and devices; None for float32 at least.
    """

    loss: Loss
    key: Callable[[jax.Array], jax.Array | None] = lambda step: None
    num_microbatches: int = 1
    dtype: Any = jnp.float32
    sums: Any = None

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
      metrics: name -> f32[]. The loss's own, means like it.
      carried: what the next step gets.
    """

    loss: jax.Array
    tokens: jax.Array
    norm: jax.Array
    grads: Any
    metrics: dict[str, jax.Array]
    carried: Any


jax.tree_util.register_dataclass(Gradients, [field.name for field in fields(Gradients)], [])


def auto(objective: Objective, how: Lowering | None) -> Callable[..., Gradients]:
    """(params, batch, step, carried) -> `Gradients`, on global arrays: XLA chooses the collectives.

    Args:
      how: None on one device.
    """

    def gradients(params: Any, batch: Batch, step: jax.Array, carried: Any) -> Gradients:
        with lowering(how):
            got, grads = _accumulate(objective, objective.cast(params), batch, step, carried)
        loss, metrics, grads = _means(got, grads)
        norm = jnp.sqrt(sum(map(_square, jax.tree.leaves(grads))))
        return Gradients(loss, got.count, norm, grads, metrics, got.carried)

    return gradients


def manual(
    objective: Objective, how: Lowering, placement: StatePlacement, batch: dict[str, jax.ShapeDtypeStruct]
) -> Callable[..., Gradients]:
    """(params, batch, step, carried) -> `Gradients`, in one `shard_map` over all axes: communication is what it says.

    Args:
      batch: the arrays of a batch, with shardings; without `rows`.

    Communication: that of `parallel.data` and `parallel.tensor`, and all-reduces of the scalars.
    """
    dims = jax.tree.map(lambda p: p.spec.dims, placement.sharded)
    pspecs = jax.tree.map(lambda p: p.pspec, placement.sharded)

    def local(params: Any, batch: Batch, step: jax.Array, carried: Any) -> Gradients:
        with lowering(how):
            got, grads = _accumulate(objective, data.enter(params, dims), batch, step, carried)
            got = _summed(got, how)
            loss, metrics, grads = _means(got, data.reduce(grads, dims))
            return Gradients(loss, got.count, _global_norm(grads, placement.sharded), grads, metrics, got.carried)

    scalar, carried = PartitionSpec(), jax.tree.map(lambda p: p.pspec, placement.carried)
    stored = jax.tree.map(lambda p: p.pspec, placement.params)
    return jax.shard_map(
        local, mesh=how.mesh,
        in_specs=(stored, batch_pspecs(how, batch), scalar, carried),
        out_specs=Gradients(scalar, scalar, scalar, pspecs, scalar, carried), check_vma=True,  # pyright: ignore
    )  # fmt: skip


def batch_pspecs(how: Lowering, batch: dict[str, jax.ShapeDtypeStruct]) -> dict[str, PartitionSpec]:
    """How the arrays of a batch are sharded, and the indices of its rows."""
    given = {name: struct.sharding.spec for name, struct in batch.items()}  # pyright: ignore
    return given | {"rows": PartitionSpec(how.axes("batch") or None)}


def _accumulate(objective: Objective, params: Any, batch: Batch, step: jax.Array, carried: Any) -> tuple[Tally, Any]:
    """Sums of losses and of gradients over the microbatches; each gets what the one before it carried."""

    def one(batch: Batch, carried: Any) -> tuple[Tally, Any]:
        def loss(params: Any) -> tuple[jax.Array, Tally]:
            tally = objective.loss(params, batch, objective.key(step), carried)
            return tally.loss, tally

        grads, tally = jax.grad(loss, has_aux=True)(params)
        return tally, jax.tree.map(lambda g: summed_in(g, objective.sums), grads)

    def add(sums: Any, micro: Batch) -> tuple[Any, dict[str, jax.Array]]:
        total, count, grads, carried = sums
        tally, more = one(micro, carried)
        new = jax.tree.map(jnp.add, (total, count, grads), (tally.loss, tally.count, more))
        return (*new, tally.carried), tally.metrics

    num = objective.num_microbatches
    if num == 1:
        return one(batch, carried)
    zeros = (*_zeros(objective, params, batch), carried)
    (total, count, grads, carried), metrics = lax.scan(add, zeros, _microbatches(batch, num))
    return Tally(total, count, jax.tree.map(lambda x: x.sum(axis=0), metrics), carried), grads


def _zeros(objective: Objective, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array, Any]:
    grads = jax.tree.map(lambda p: varying_like(jnp.zeros_like(summed_in(p, objective.sums)), p), params)
    total = wide(jnp.zeros((), jax.tree.leaves(params)[0].dtype))
    return varying_like(total, batch["rows"]), varying_like(jnp.int32(0), batch["rows"]), grads


def _microbatches(batch: Batch, num: int) -> Batch:
    """[batch, ...] -> [num, batch / num, ...], each device keeping the rows that it has."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] // num, num, *x.shape[1:]).swapaxes(0, 1), batch)


def _summed(tally: Tally, how: Lowering) -> Tally:
    """Over the devices that hold other rows."""
    loss, count, metrics = _psum((tally.loss, tally.count, tally.metrics), how.axes("batch"))
    return Tally(loss, count, metrics, tally.carried)


def _means(sums: Tally, grads: Any) -> tuple[jax.Array, dict[str, jax.Array], Any]:
    count = jnp.maximum(sums.count, 1)
    return jax.tree.map(lambda x: x / count.astype(x.dtype), (sums.loss, sums.metrics, grads))


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
