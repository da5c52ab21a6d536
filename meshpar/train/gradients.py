"""Loss and gradients of one step, in three ways that must agree: on one device, manual, and under GSPMD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.parallel import data
from meshpar.parallel.buckets import order_of
from meshpar.parallel.local import varying, varying_like
from meshpar.parallel.pipeline.execute import Pipeline
from meshpar.parallel.precision import summed_in, wide
from meshpar.sharding.constrain import Lowering, lowering, manual_axes
from meshpar.sharding.resolve import sharding_axes
from meshpar.train.freeze import for_good, thawed
from meshpar.train.frozen import filled, without
from meshpar.train.kept import REDUCE, of_loss
from meshpar.train.loss import Batch, Loss, Tally
from meshpar.train.state import StatePlacement
from meshpar.tree import map_with_path


@dataclass(frozen=True)
class Objective:
    """What is minimized, and how a step goes about it; the same for every lowering.

    Args:
      loss: (params, batch, key, carried) -> `Tally`.
      key: step -> the step's random key, or None where the model draws nothing.
      num_microbatches: how many parts the batch is computed in, one after the other.
      dtype: of the parameters in the computation; that of the state is its own.
      sums: in which gradients are summed over microbatches and devices; None for float32 at least.
      frozen: how many steps each parameter is frozen, see `freeze.frozen_until`; None where none is.
      pipeline: how the manual lowering computes `loss` in stages; None where there are none.
    """

    loss: Loss
    key: Callable[[jax.Array], jax.Array | None] = lambda step: None
    num_microbatches: int = 1
    dtype: Any = jnp.float32
    sums: Any = None
    frozen: Any = None
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
    objective: Objective,
    how: Lowering,
    placement: StatePlacement,
    batch: dict[str, jax.ShapeDtypeStruct],
    seed: int = 0,
) -> Callable[..., Gradients]:
    """(params, batch, step, carried) -> `Gradients`, in one `shard_map` over all axes: communication is what it says.

    Args:
      batch: the arrays of a batch, with shardings; without `rows`.
      seed: the run's, for a reduction that rounds by chance.

    Communication: that of `parallel.data` and `parallel.tensor`, and all-reduces of the scalars.
    """
    dims = jax.tree.map(lambda p: p.spec.dims, placement.sharded)
    trained = placement.trained
    learns = map_with_path(lambda path, _: path not in placement.frozen, placement.sharded)
    trained_dims = jax.tree.map(lambda p: p.spec.dims, trained)

    def local(params: Any, batch: Batch, step: jax.Array, carried: Any) -> Gradients:
        def gradients(params: Any) -> tuple[Tally, Any]:
            return _accumulate(objective, params, batch, step, of_loss(carried))

        with lowering(how):
            entered = data.enter(params, dims, learns)
            got, grads = gradients(entered)
            order = order_of(lambda params: gradients(params)[1], entered) if how.reduce else None
            kept = jax.tree.map(lambda x: x[0], carried.get(REDUCE, {}))
            grads, kept = data.reduce(grads, trained_dims, kept, key=_rounding_key(seed, step), order=order)
            got = _summed(got, how)
            loss, metrics, grads = _means(got, grads)
            norm = _global_norm(grads, trained)
            return Gradients(loss, got.count, norm, grads, metrics, got.carried | _kept(kept))

    learned = jax.tree.map(lambda p: p.pspec, trained)
    scalar, carried = PartitionSpec(), jax.tree.map(lambda p: p.pspec, placement.carried)
    stored = jax.tree.map(lambda p: p.pspec, placement.params)
    return jax.shard_map(
        local, mesh=how.mesh,
        in_specs=(stored, batch_pspecs(how, batch), scalar, carried),
        out_specs=Gradients(scalar, scalar, scalar, learned, scalar, carried), check_vma=True,  # pyright: ignore
    )  # fmt: skip


def _rounding_key(seed: int, step: jax.Array) -> jax.Array:
    """The random key by which a step's gradients are rounded; none that the loss draws from, as no step is so late."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 2**31), step)


def _kept(kept: Any) -> dict[str, Any]:
    """What the reduction left, as it is carried: with a dim for the copies."""
    return {REDUCE: jax.tree.map(lambda x: x[None], kept)} if kept else {}


STALE = "stale"
"""The key of the parameters before the last update, among what is carried from step to step."""


def stale(gradients: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """The same, at the parameters before the last update; those of this step are carried to the next.

    Memory: the parameters once more, sharded as their gradients.
    Source: Narayanan et al. 2021, arXiv:2006.09503.
    """

    def at_stale(params: Any, batch: Batch, step: jax.Array, carried: Any) -> Gradients:
        return replace(gradients(carried[STALE], batch, step, carried), carried={STALE: params})

    return at_stale


def batch_pspecs(how: Lowering, batch: dict[str, jax.ShapeDtypeStruct]) -> dict[str, PartitionSpec]:
    """How the arrays of a batch are sharded, and the indices of its rows."""
    given = {name: struct.sharding.spec for name, struct in batch.items()}  # pyright: ignore
    return given | {"rows": PartitionSpec(how.axes("batch") or None)}


def _accumulate(objective: Objective, params: Any, batch: Batch, step: jax.Array, carried: Any) -> tuple[Tally, Any]:
    """Sums of losses and of gradients over the microbatches; each gets what the one before it carried."""

    trained = without(params, for_good(objective.frozen))

    def one(batch: Batch, carried: Any) -> tuple[Tally, Any]:
        if objective.pipeline:
            sums, grads = objective.pipeline.gradients(params, batch, objective.key(step), objective.sums)
            return Tally(*sums, carried), grads

        def loss(trained: Any) -> tuple[jax.Array, Tally]:
            params_now = thawed(filled(trained, params), objective.frozen, step)
            tally = objective.loss(params_now, batch, objective.key(step), carried)
            return tally.loss, tally

        grads, tally = jax.grad(loss, has_aux=True)(trained)
        return tally, jax.tree.map(lambda g: summed_in(g, objective.sums), grads)

    def add(sums: Any, micro: Batch) -> tuple[Any, tuple[jax.Array, dict[str, jax.Array]]]:
        total, grads, carried = sums
        tally, more = one(micro, carried)
        new = jax.tree.map(jnp.add, (total, grads), (tally.loss, more))
        return (*new, tally.carried), (tally.count, tally.metrics)

    num = objective.num_microbatches
    if num == 1:
        return one(batch, carried)
    zeros = (*_zeros(objective, trained, batch), carried)
    (total, grads, carried), sums = lax.scan(add, zeros, _microbatches(batch, num))
    count, metrics = jax.tree.map(lambda x: x.sum(axis=0, dtype=x.dtype), sums)
    return Tally(total, count, metrics, carried), grads


def _zeros(objective: Objective, params: Any, batch: Batch) -> tuple[jax.Array, Any]:
    grads = jax.tree.map(lambda p: varying_like(jnp.zeros_like(summed_in(p, objective.sums)), p), params)
    total = wide(jnp.zeros((), jax.tree.leaves(params)[0].dtype))
    sum_of = lambda zero: varying(varying_like(zero, batch["rows"]), manual_axes("stage"))
    return sum_of(total), grads


def _microbatches(batch: Batch, num: int) -> Batch:
    """[batch, ...] -> [num, batch / num, ...], each device keeping the rows that it has."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] // num, num, *x.shape[1:]).swapaxes(0, 1), batch)


def _summed(tally: Tally, how: Lowering) -> Tally:
    """Over the devices that hold other rows, or the last stage."""
    loss, count, metrics = _psum((tally.loss, tally.count, tally.metrics), how.axes("batch") + how.axes("stage"))
    return Tally(loss, count, metrics, tally.carried)


def _means(sums: Tally, grads: Any) -> tuple[jax.Array, dict[str, jax.Array], Any]:
    count = jnp.where(sums.count > 0, sums.count, jnp.ones_like(sums.count))  # weights may sum to less than 1
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
