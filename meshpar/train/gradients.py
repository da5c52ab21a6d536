"""Computes the loss and gradients of a step, with one function for every lowering."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.mesh.varying import varying_like
from meshpar.optim.freeze import for_good, thawed
from meshpar.optim.frozen_layers import without_frozen_rows
from meshpar.parallel import data
from meshpar.parallel.batch import Batch, split_off_shared
from meshpar.parallel.buckets import order_of
from meshpar.parallel.context import ParallelContext
from meshpar.parallel.pipeline.execute import Pipeline
from meshpar.parallel.precision import summed_in, variables, wide, with_variables
from meshpar.parallel.trainable import filled, without
from meshpar.sharding.spec import ArraySpec
from meshpar.train.error_feedback import REDUCE
from meshpar.train.loss import Loss, LossSums, check_names
from meshpar.train.program import WHOLE, batch_pspecs, on_shards, pspecs
from meshpar.train.state import StatePlacement
from meshpar.train.strategy import of_loss
from meshpar.tree import map_with_path


@dataclass(frozen=True)
class Objective:
    """What a step minimizes, the same for every lowering.

    Args:
      loss: (params, batch, key, carried) -> `LossSums`.
      key: step -> the step's random key; None if the loss uses no randomness.
      frozen: for how many steps each parameter is frozen, see `freeze.frozen_until`; None if none is.
      frozen_rows: which layers of stacks are frozen, see `frozen_layers`; None if none is.
      pipeline: computes `loss` in stages under the manual lowering; None without stages.
      unseen: the keys of the carried state that only the step reads, see `Strategy`.
      copies: the keys under which it has copies of the parameters, which the loss reads and nothing changes.
    """

    loss: Loss
    key: Callable[[jax.Array], jax.Array | None] = lambda step: None
    frozen: Any = None
    frozen_rows: Any = None
    pipeline: Pipeline | None = None
    unseen: frozenset[str] = frozenset()
    copies: tuple[str, ...] = ()

    def gathered(self, carried: Any, dims: Any) -> dict[str, Any]:
        """The copies of the parameters in the carried state, prepared as these are, see `data.gather_params`."""
        return {key: data.gather_params(carried[key], dims) for key in self.copies}


@dataclass(frozen=True)
class Gradients:
    """The result of a step before the optimizer.

    Args:
      loss: f32[]. Mean over the real tokens of all devices and microbatches.
      tokens: int32[]. The number of these tokens.
      norm: f32[]. The global norm of the gradients.
      grads: like the parameters, each sharded as `StatePlacement.sharded`.
      metrics: name -> f32[]. The loss's own metrics, means over the same tokens.
      carried: the carried state for the next step.
    """

    loss: jax.Array
    tokens: jax.Array
    norm: jax.Array
    grads: Any
    metrics: dict[str, jax.Array]
    carried: Any


jax.tree_util.register_dataclass(Gradients, [field.name for field in fields(Gradients)], [])


def gradients(
    objective: Objective, ctx: ParallelContext, placement: StatePlacement, batch: dict[str, ArraySpec], seed: int = 0
) -> Callable[..., Gradients]:
    """(params, batch, step, carried) -> `Gradients`, on global arrays, in the lowering of `ctx`.

    Args:
      batch: the arrays of a batch, without `rows`.
      seed: of the run, for a reduction with stochastic rounding.

    Communication: that of `local_gradients`.
    """
    carried = pspecs(placement.carried)
    in_specs = (pspecs(placement.params), batch_pspecs(ctx, batch), WHOLE, carried)
    out_specs = Gradients(WHOLE, WHOLE, WHOLE, pspecs(placement.trained), WHOLE, carried)  # pyright: ignore
    return on_shards(local_gradients(objective, ctx, placement, seed), ctx, in_specs, out_specs)


def local_gradients(
    objective: Objective, ctx: ParallelContext, placement: StatePlacement, seed: int = 0
) -> Callable[..., Gradients]:
    """(params, batch, step, carried) -> `Gradients`, on local shards, traced with `ctx` as the current context.

    Communication: in the manual lowering that of `parallel.data` and `parallel.tensor`, and all-reduces of the scalars;
      under GSPMD XLA chooses it.
    """
    dims = jax.tree.map(lambda p: p.spec.dims, placement.sharded)
    trainable = map_with_path(lambda path, _: path not in placement.frozen, placement.sharded)
    unchanged = {*objective.unseen, *objective.copies}
    trained = placement.trained
    trained_dims = jax.tree.map(lambda p: p.spec.dims, trained)

    def local(params: Any, batch: Batch, step: jax.Array, carried: Any) -> Gradients:
        copies = objective.gathered(carried, dims)
        changed = of_loss(carried, unchanged)

        def accumulated(params: Any) -> tuple[LossSums, Any]:
            return _accumulate(objective, ctx, params, batch, step, changed, copies)

        entered = data.gather_params(params, dims, trainable)
        sums, grads = accumulated(entered)
        order = order_of(lambda params: accumulated(params)[1], entered) if ctx.gradient_reduction else None
        grads = without_frozen_rows(thawed(grads, objective.frozen, step), objective.frozen_rows)
        error_feedback = jax.tree.map(lambda x: x[0], carried.get(REDUCE, {}))
        # For stochastic rounding. No run has 2**31 steps, so the loss never draws from this key.
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 2**31), step)
        grads, error_feedback = data.reduce_gradients(grads, trained_dims, error_feedback, key=key, order=order)
        check_names(sums.metrics)
        loss, count, metrics = data.summed(sums.sums)
        divisor = jnp.where(count > 0, count, jnp.ones_like(count))  # weights may sum to less than 1
        # The norm of the sums, and products with the reciprocal: the compiler fuses these with the optimizer.
        norm = data.global_norm(grads, trained)
        loss, metrics, norm = jax.tree.map(lambda x: x / divisor.astype(x.dtype), (loss, metrics, norm))
        grads = jax.tree.map(lambda g: (wide(g) * (1 / divisor.astype(wide(g).dtype))).astype(g.dtype), grads)
        next_carried = sums.carried
        if kept := {key: carried[key] for key in unchanged if key in carried}:
            next_carried = next_carried | kept
        if error_feedback:
            next_carried = next_carried | {REDUCE: jax.tree.map(lambda x: x[None], error_feedback)}
        return Gradients(loss, count, norm, grads, metrics, next_carried)

    return local


def _accumulate(
    objective: Objective, ctx: ParallelContext, params: Any, batch: Batch, step: jax.Array, carried: Any, copies: Any
) -> tuple[LossSums, Any]:
    """Sums losses and gradients over the microbatches. Each microbatch gets the carried state of the one before.

    Args:
      copies: copies of the parameters, which the loss finds in its carried state.
    """
    trained = without(params, for_good(objective.frozen))
    differentiated = variables(trained)

    def of_microbatch(batch: Batch, carried: Any) -> tuple[LossSums, Any]:
        if objective.pipeline:
            pipeline, key = objective.pipeline, objective.key(step)
            sums, grads, carried = pipeline.gradients(params, trained, batch, key, carried, ctx.accum_dtype)
            return LossSums(*sums, carried), grads

        def loss(differentiated: Any) -> tuple[jax.Array, LossSums]:
            whole = filled(with_variables(trained, differentiated), params)
            sums = objective.loss(whole, batch, objective.key(step), carried | copies if copies else carried)
            return sums.loss, replace(sums, carried=of_loss(sums.carried, copies))

        grads, sums = jax.grad(loss, has_aux=True)(differentiated)
        return sums, jax.tree.map(lambda g: summed_in(g, ctx.accum_dtype), grads)

    def add(sums: Any, batch: Batch) -> tuple[Any, tuple[jax.Array, dict[str, jax.Array]]]:
        total, grads, carried = sums
        one, more = of_microbatch(batch | shared, carried)
        total, grads = jax.tree.map(jnp.add, (total, grads), (one.loss, more))
        return (total, grads, one.carried), (one.count, one.metrics)

    def split(x: jax.Array) -> jax.Array:
        """[batch, ...] -> [num, batch / num, ...]; each device keeps its own rows."""
        num = ctx.num_microbatches
        return x.reshape(x.shape[0] // num, num, *x.shape[1:]).swapaxes(0, 1)

    if ctx.num_microbatches == 1:
        return of_microbatch(batch, carried)
    rows, shared = split_off_shared(batch)
    grads = jax.tree.map(lambda p: varying_like(jnp.zeros_like(summed_in(p, ctx.accum_dtype)), p), differentiated)
    total = varying_like(wide(jnp.zeros((), jax.tree.leaves(differentiated)[0].dtype).real), batch["rows"])
    zeros = (data.partial_sum(total), grads, carried)
    (total, grads, carried), sums = lax.scan(add, zeros, jax.tree.map(split, rows))
    count, metrics = jax.tree.map(lambda x: x.sum(axis=0, dtype=x.dtype), sums)
    return LossSums(total, count, metrics, carried), grads
