"""Trains slices of the mesh alone, and synchronizes them at the end of each round; see `parallel.local_updates`.

A `TrainState` then holds the shared parameters, and the outer optimizer's state as its `opt_state`, so evaluations,
exports and other runs read it like any other state. The slices' own arrays are carried state, `carried[SLICES]`:

- `params`: their trained parameters;
- `opt_state`: the state of the run's optimizer, `optim`;
- `carried`: the state that a slice carries from step to step;
- `rounding`: the rounding errors of compressed differences, if they are fed back.

All of these have a first dim `slices`, sharded over the axis of local updates. `skipped` has it too: a slice skips a
step alone. So arrays that differ between slices are different shards of one array, and replicated arrays do not differ.

With `overlap_steps` there are also `means` without that dim: the mean differences that wait for their outer step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.mesh.varying import invariant, varying
from meshpar.parallel import data
from meshpar.parallel.batch import Batch
from meshpar.parallel.buckets import Copied, sum_copies
from meshpar.parallel.context import ParallelContext
from meshpar.parallel.local_updates import LocalUpdates
from meshpar.parallel.precision import wide, wide_dtype
from meshpar.parallel.trainable import as_in, filled, without
from meshpar.sharding.resolve import Placement
from meshpar.sharding.spec import ArraySpec
from meshpar.train.error_feedback import SLICES, place_state, zeros
from meshpar.train.fragments import Fragment, layer_numbers
from meshpar.train.gradients import Gradients, Objective, local_gradients
from meshpar.train.outer import outer_step
from meshpar.train.program import (
    WHOLE,
    batch_pspecs,
    on_shards,
    pspecs,
    shardings,
    structs,
    trace,
    with_rows,
)
from meshpar.train.state import StatePlacement, TrainState, on_device
from meshpar.train.step import Metrics, Update


@dataclass(frozen=True)
class Slices:
    """The programs of a training with local updates, before they are compiled.

    Args:
      local: the settings of the local updates.
      ctx: of the whole mesh.
      alone: the placement of a slice's state, which is that of a training without local updates.
      shared: the placement of the whole state.
      update: applies the run's optimizer in a slice.
      seed: for stochastic rounding of compressed differences.
    """

    local: LocalUpdates
    ctx: ParallelContext
    alone: StatePlacement
    shared: StatePlacement
    update: Update
    seed: int = 0

    @property
    def num(self) -> int:
        """The number of slices."""
        return self.ctx.mesh.shape[self.local.axis]

    def step(
        self, gradients: Callable[..., Gradients], *, averages: bool = False
    ) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        """A step of every slice.

        Args:
          gradients: see `slice_gradients`.
          averages: whether `gradients` averages over slices; all slices, and the shared parameters, are then equal.

        Returns:
          (state, batch) -> the state, and the metrics of each slice [slices].
        """
        axis = self.local.axis
        sharded = shardings(structs(self.alone.trained))
        placed = self.shared.carried[SLICES]

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            own = state.carried[SLICES]
            got = gradients((state.params, own["params"]), with_rows(batch), state.step, own["carried"])

            def update(got: Gradients, params: Any, opt_state: Any, skipped: Any, carried: Any) -> Any:
                got = replace(got, grads=lax.with_sharding_constraint(got.grads, sharded))
                new, metrics = self.update(TrainState(state.step, params, opt_state, skipped, carried), got, sharded)
                return new.params, new.opt_state, new.skipped, new.carried, metrics

            updated = jax.vmap(update, spmd_axis_name=axis)
            opt_state = on_device(own["opt_state"], placed["opt_state"])
            params, opt_state, skipped, carried, metrics = updated(
                got, own["params"], opt_state, state.skipped, own["carried"]
            )
            shared = filled(self._first(params), state.params) if averages else state.params
            own = own | {"params": params, "opt_state": opt_state, "carried": carried}
            carried = state.carried | {SLICES: own}
            return replace(state, step=state.step + 1, params=shared, skipped=skipped, carried=carried), metrics

        return step

    @property
    def fragments(self) -> list[Fragment]:
        """The fragments. Their rounds end in turn."""
        num = self.local.fragments
        numbers = layer_numbers(self.alone.trained) if num > 1 else {}
        return [Fragment(index, num, numbers) for index in range(num)]

    def trace_outer(self) -> list[jax.stages.Traced]:
        """Traces `outer_step` of each fragment. The state is donated."""
        state = self.shared.structs
        steps = [self.outer_step(self.local.outer.build(), fragment) for fragment in self.fragments]
        return [trace(step, (state,), shardings(state), donate=(0,)) for step in steps]

    def trace_reductions(self) -> list[jax.stages.Traced]:
        """Traces the reduction that `reducing_step` of each fragment adds to a step; none without `overlap_steps`."""
        fragments = self.fragments if self.local.overlap_steps else []
        return [jax.jit(partial(self._reduced, fragment)).trace(self.shared.structs) for fragment in fragments]

    def reducing_step(
        self, step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]], fragment: Fragment
    ) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        """A step of every slice, and the all-reduce of the round that ended before this step.

        Neither depends on the other's results, so a compiler may run both at once.
        """

        def reducing(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            reduced = self._reduced(fragment, state)
            new, metrics = step(state, batch)
            return replace(new, carried=new.carried | {SLICES: new.carried[SLICES] | reduced}), metrics

        return reducing

    def _reduced(self, fragment: Fragment, state: TrainState) -> dict[str, Any]:
        """The arrays of slices that the reduction of a fragment changes: `means` and `rounding`."""
        own = state.carried[SLICES]
        placed = self.shared.carried[SLICES]
        means, rounding = self._mean_differences(fragment, self._shared(fragment, state), own, state.step)
        return {
            "means": fragment.into(means, own["means"], placed["means"]),
            "rounding": fragment.into(rounding, own["rounding"], placed["rounding"]),
        }

    def _shared(self, fragment: Fragment, state: TrainState) -> Any:
        """The shared parameters of a fragment that are trained, sharded as far as the rules allow."""
        whole = without(self.alone.params, self.alone.frozen)
        shared = as_in(state.carried[SLICES]["params"], state.params)
        sharded = shardings(structs(fragment.placements(self.alone.trained)))
        return lax.with_sharding_constraint(fragment.of(shared, whole), sharded)

    def outer_step(self, tx: optax.GradientTransformation, fragment: Fragment) -> Callable[[TrainState], TrainState]:
        """The end of a round: `tx` updates the shared parameters of a fragment, and all slices continue from them.

        With `overlap_steps` it reads the means that `reducing_step` stored, and slices mix the new parameters with
        their own.
        """
        placed = self.shared.carried[SLICES]
        whole = without(self.alone.params, self.alone.frozen)
        sharded = shardings(structs(fragment.placements(self.alone.trained)))
        stored = shardings(structs(fragment.placements(whole)))

        def outer(state: TrainState) -> TrainState:
            own = state.carried[SLICES]
            trained = self._shared(fragment, state)
            if self.local.overlap_steps:
                means = fragment.of(own["means"], placed["means"])
                rounding = own["rounding"]
            else:
                means, rounding = self._mean_differences(fragment, trained, own, state.step)
                rounding = fragment.into(rounding, own["rounding"], placed["rounding"])
            opt_state = fragment.of(state.opt_state, self.shared.opt_state)
            trained, opt_state = outer_step(tx, means, opt_state, trained)
            trained = lax.with_sharding_constraint(trained, sharded)
            trained = lax.with_sharding_constraint(trained, stored)  # ZeRO-1 gathers once, for slices and evaluations
            begun = jax.tree.map(self._to_all, trained)
            if self.local.overlap_steps:
                begun = jax.tree.map(self._mixed, fragment.of(own["params"], placed["params"]), begun)
            params = fragment.into(begun, own["params"], placed["params"])
            shared = as_in(own["params"], state.params)
            return replace(
                state,
                params=filled(fragment.into(trained, shared, whole), state.params),
                opt_state=fragment.into(opt_state, state.opt_state, self.shared.opt_state),
                carried=state.carried | {SLICES: own | {"params": params, "rounding": rounding}},
            )

        return outer

    def initial(self, trained: Any, opt_state: Any, carried: Any) -> dict[str, Any]:
        """The slices' arrays at the first parameters.

        Args:
          trained: the shared parameters, without frozen ones.
          opt_state, carried: of one slice.
        """
        placed = self.shared.carried[SLICES]
        own = jax.tree.map(self._to_all, {"params": trained, "opt_state": opt_state, "carried": carried})
        return own | {name: zeros(placed[name]) for name in ("rounding", "means") if name in placed}

    def _to_all(self, x: jax.Array) -> jax.Array:
        """x[...] -> [slices, ...]. Communication: none; each slice has x."""
        return jnp.broadcast_to(x, (self.num, *x.shape))

    def _mixed(self, own: jax.Array, shared: jax.Array) -> jax.Array:
        return self.local.mixing * own + (1 - self.local.mixing) * shared

    def _first(self, params: Any) -> Any:
        """The parameters of one slice, if those of all slices are equal. Communication: none."""
        placed = self.shared.carried[SLICES]["params"]
        axes = (self.local.axis,)

        def local(own: Any) -> Any:
            return jax.tree.map(lambda x: invariant(x[0], axes), own)

        stored = without(self.alone.params, self.alone.frozen)
        return on_shards(local, self.ctx, (pspecs(placed),), pspecs(stored))(params)

    def _mean_differences(self, fragment: Fragment, shared: Any, own: Any, step: jax.Array) -> tuple[Any, Any]:
        """The means over slices of `shared - own`, in at least float32, and the new rounding errors, of a fragment.

        Args:
          shared: the shared parameters of the fragment.
          own: the arrays of the slices.

        Communication: an all-reduce over the axis, or that of `Reduce.sum` for each bucket.
        """
        axes = (self.local.axis,)
        reduction = self.local.reduction

        def local(shared: Any, own: Any, rounding: Any, step: jax.Array) -> tuple[Any, Any]:
            differences = jax.tree.map(lambda x, y: varying(wide(x), axes) - wide(y[0]), shared, own)
            if reduction is None:
                return jax.tree.map(lambda x: lax.psum(x, axes) / self.num, differences), rounding
            leaves, tree = jax.tree.flatten(differences)
            states = {name: [x[0] for x in tree.flatten_up_to(errors)] for name, errors in rounding.items()}
            copied = [Copied(x, (), axes, {name: s[i] for name, s in states.items()}) for i, x in enumerate(leaves)]
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), 2**31), step)
            sums = sum_copies(copied, range(len(leaves)), reduction, key)
            means = tree.unflatten([total / self.num for total, _ in sums])
            return means, {name: tree.unflatten([state[name][None] for _, state in sums]) for name in rounding}

        placed = self.shared.carried[SLICES]
        params = fragment.of(own["params"], placed["params"])
        rounding = fragment.of(own["rounding"], placed["rounding"])
        sharded = fragment.placements(self.alone.trained)
        each = pspecs(in_slices(sharded, self.local.axis))
        errors = pspecs(fragment.placements(placed["rounding"]))
        summed = on_shards(local, self.ctx, (pspecs(sharded), each, errors, WHOLE), (pspecs(sharded), errors))
        return summed(shared, params, rounding, step)


def slice_gradients(
    objective: Objective,
    ctx: ParallelContext,
    placement: StatePlacement,
    batch: dict[str, ArraySpec],
    seed: int = 0,
    *,
    averages: bool = False,
) -> Callable[..., Gradients]:
    """((shared, the slices' params), batch, step, the slices' carried state) -> `Gradients` with a first dim `slices`.

    Args:
      ctx: of the whole mesh.
      placement: of a slice's state, which is that of a training without local updates.
      averages: whether gradients, loss and metrics are the means over the tokens of all slices.

    Communication: that of `gradients` inside a slice. With `averages` also an all-reduce of the gradients over slices.
    """
    assert ctx.parallel.local, "only a training with local updates has slices"
    axis = ctx.parallel.local.axis
    in_slice = local_gradients(objective, ctx.in_slice, placement, seed)

    def local(params: Any, batch: Batch, step: jax.Array, carried: Any) -> Gradients:
        shared, own = params
        own, carried = jax.tree.map(lambda x: x[0], (own, carried))
        got = in_slice(filled(own, shared), batch, step, carried)
        if averages:
            got = _averaged(got, placement, axis)
        return jax.tree.map(lambda x: x[None], got)

    carried = pspecs(in_slices(placement.carried, axis))
    stored = in_slices(without(placement.params, placement.frozen), axis)
    in_specs = ((pspecs(placement.params), pspecs(stored)), batch_pspecs(ctx, batch), WHOLE, carried)
    each = PartitionSpec(axis)
    grads = pspecs(in_slices(placement.trained, axis))
    out_specs = Gradients(each, each, each, grads, each, carried)  # pyright: ignore
    return on_shards(local, ctx.in_slice, in_specs, out_specs)


def _averaged(got: Gradients, placement: StatePlacement, axis: str) -> Gradients:
    """The means over the tokens of all slices. The number of tokens remains the slice's own."""
    total = jnp.maximum(lax.psum(got.tokens, axis), 1)

    def mean(x: jax.Array) -> jax.Array:
        weight = got.tokens.astype(x.dtype) / total.astype(x.dtype)
        return lax.psum(varying(x * weight, (axis,)), axis)

    loss, metrics, grads = jax.tree.map(mean, (got.loss, got.metrics, got.grads))
    norm = data.global_norm(grads, placement.trained)
    return replace(got, loss=loss, metrics=metrics, grads=grads, norm=norm)


def place_slices(alone: StatePlacement, outer_state: Any, local: LocalUpdates) -> StatePlacement:
    """The placement of a state with local updates.

    Args:
      alone: of a slice's state, which is that of a training without local updates.
      outer_state: of the outer optimizer.
    """
    stored = without(alone.params, alone.frozen)
    own = in_slices({"params": stored, "opt_state": alone.opt_state, "carried": alone.carried}, local.axis)
    axes = (local.axis,)
    rounding = place_state(alone.trained, local.reduction, lambda p: axes) if local.reduction else {}
    means = {"means": jax.tree.map(_widened, alone.trained)} if local.overlap_steps else {}
    carried = {SLICES: own | {"rounding": rounding} | means}
    return replace(alone, opt_state=outer_state, carried=carried, slices=local.axis)


def _widened(placement: Placement) -> Placement:
    """In the dtype of a mean difference."""
    return replace(placement, spec=replace(placement.spec, dtype=wide_dtype(placement.spec.dtype)))


def in_slices(placements: Any, axis: str) -> Any:
    """Converts the placements of one slice's arrays [...] to placements of all slices' arrays [slices, ...]."""

    def stack(p: Placement) -> Placement:
        spec = ArraySpec((p.mesh.shape[axis], *p.spec.shape), p.spec.dtype, ("slices", *p.spec.dims))
        return replace(p, spec=spec, axes=((axis,), *p.axes), reason=("slices", *p.reason) if p.reason else ())

    return jax.tree.map(stack, placements)
