"""A training: a loss, an optimizer and a mesh, prepared as far as possible without a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import Any, Self

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.cost.flops import needed_flops, traced_products
from meshpar.errors import ConfigError
from meshpar.optim.freeze import for_good
from meshpar.parallel.batch import Batch
from meshpar.parallel.context import ParallelContext
from meshpar.parallel.pipeline.execute import Pipeline
from meshpar.parallel.rounds import Rounds
from meshpar.parallel.trainable import without
from meshpar.train.batches import arranged, check_batch
from meshpar.train.error_feedback import REDUCE, SLICES
from meshpar.train.evaluate import Evaluation, LazyEvaluation, trace_evaluation, trace_row_results
from meshpar.train.fragments import check_fragments
from meshpar.train.gradients import Gradients, Objective, gradients
from meshpar.train.local_step import LocalStep
from meshpar.train.loss import Loss, of_shards
from meshpar.train.loss_on_mesh import LossOnMesh
from meshpar.train.program import compile_program
from meshpar.train.slices import Slices, place_slices, slice_gradients
from meshpar.train.state import StatePlacement, TrainState, compile_init, place, place_opt_state
from meshpar.train.step import Metrics, Step, Update, compile_step, step_function
from meshpar.train.stored_layers import LAYERS, LayerArrays, LayerOrder, StoredLayers, cut_loss


@dataclass(frozen=True, kw_only=True)
class Training(LossOnMesh):
    """A training step and its mesh. `training.on(mesh=...)` is the same training on another mesh.

    Args: besides those of `LossOnMesh`,
      init: key -> the first parameters, in any dtype.
      update: applies the optimizer.
      seed: for the first parameters, and for gradients with stochastic rounding.
      init_carried: key -> the first carried state.
      frozen: for how many steps each parameter is frozen, see `freeze.frozen_until`; None if none is.
      frozen_rows: which layers of stacks are frozen, see `frozen_layers`; None if none is.
      is_offloaded: whether the optimizer's state is stored in the host's memory between steps.
      evaluation: the loss for evaluations; default: `loss` without a key.
      of_rows: (params, batch, key, carried) -> what metrics of all rows together need; None if there are none.
      rounds: when the rounds of local updates end; None without them.
    """

    init: Callable[[jax.Array], Any]
    update: Update
    seed: int = 0
    init_carried: Callable[[jax.Array], Any] = lambda key: {}
    frozen: Any = None
    frozen_rows: Any = None
    is_offloaded: bool = False
    evaluation: Loss | None = None
    of_rows: Callable[..., dict[str, jax.Array]] | None = None
    rounds: Rounds | None = None

    @property
    def _set_by_steps(self) -> tuple[str, ...]:
        """The paths of parameters that a step sets itself, such as the loads of routers."""
        state_params = self.update.state_params
        return tuple(state_params.paths) if state_params else ()

    @cached_property
    def placement(self) -> StatePlacement:
        """How the state of the training is sharded.

        Raises:
          ShardingError: parameters, carried state or optimizer state cannot be sharded by the rules.
          ConfigError: local updates cannot average the state that steps change, or a fragment has no parameter.
        """
        local = self.ctx.local
        alone = self.slice_placement
        if local is None:
            return alone
        if set(alone.carried) - {REDUCE} or self._set_by_steps:
            what = "steps change state of the model other than parameters, which slices do not average"
            raise ConfigError(f"parallel.local: {what}; set parallel.local=null")
        check_fragments(local.fragments, alone.trained)
        return place_slices(alone, place_opt_state(alone.trained, local.outer.build(), self.mesh), local)

    @property
    def structs(self) -> TrainState:
        """The state as `ShapeDtypeStruct`s with shardings."""
        return self.placement.structs

    @property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """Path -> names of the dims, of each array of the state that has dims."""
        return self.placement.dims

    @cached_property
    def slice_placement(self) -> StatePlacement:
        """The placement of the state of a slice that trains alone; without local updates `placement`."""
        frozen = for_good(self.frozen)
        placed = place(
            self.specs, self.rules, self.mesh, self.update.tx, self.carried, frozen, self._activation_dims,
            self.is_offloaded,
        )  # fmt: skip
        states = {one.key: one.placed(placed) for one in self.strategies if one.key}
        states = {key: placements for key, placements in states.items() if placements}
        return replace(placed, carried=placed.carried | states) if states else placed

    @cached_property
    def layer_order(self) -> LayerOrder | None:
        """Moves the layers of a state to the stages that compute with them; None if a state keeps the model's order.

        It does if the layers are on these stages already, or if each step has to move them: if a stage of an uneven cut
        computes with more or fewer layers than it stores, or if the position of the layers is unknown in an optimizer's
        array, or if a step sets rows of a parameter itself.
        """
        pipeline = None if self.ctx.local or self._set_by_steps else self.pipeline
        exchange = pipeline.permutation(self.ctx) if pipeline else None
        found = LayerOrder(exchange, self.ctx, self.placement) if exchange else None
        return found if found and found.covers_state else None

    @cached_property
    def layer_arrays(self) -> LayerArrays | None:
        """Cuts the stacks of a state into layers; None if a state keeps its stacks.

        It keeps them if anything but the model and an elementwise optimizer reads them.
        """
        if not self.update.is_elementwise or not self._reads_layers_alone:
            return None
        strategies = (self.ctx.local, self.pipeline, self.ctx.gradient_reduction)
        others = (*strategies, self.frozen, self.frozen_rows, self.slice_placement.carried, self._set_by_steps)
        if any(others) or self.is_offloaded or self.ctx.axes(LAYERS):
            return None
        return LayerArrays(self.placement, self._with_own_arrays.placement)

    @property
    def _with_own_arrays(self) -> Self:
        """The same training of a model whose layers are parameters of their own."""
        loss, specs = cut_loss(self.loss, self.specs)
        return replace(self, specs=specs, loss=loss)

    @property
    def stored_layers(self) -> StoredLayers | None:
        """Converts a state to the layout that a step needs, and back; None if that is the model's layout."""
        return self.layer_order or self.layer_arrays

    @property
    def on_prepared_states(self) -> Self:
        """The same training on states that `stored_layers` converted."""
        return self._with_own_arrays if self.layer_arrays else replace(self, in_schedule_order=bool(self.layer_order))

    @property
    def objective(self) -> Objective:
        """The loss that a step minimizes, with its key, frozen parameters and pipeline."""
        return self._objective(self.loss, self.pipeline)

    def _objective(self, loss: Loss, pipeline: Pipeline | None) -> Objective:
        loss = of_shards(loss) if self.is_local else self._whole(loss, self._batch_of_step)
        key = self.key or (lambda step: None)
        return Objective(loss, key, self.frozen, self.frozen_rows, pipeline, self._unseen, self._copies)

    @property
    def gradients(self) -> Callable[..., Gradients]:
        """(params, batch, step, carried) -> `Gradients`; the batch contains what is `given`.

        With local updates they are those of `slice_gradients`.
        """
        return self._gradients(slice_gradients if self.ctx.local else gradients)

    def _gradients(self, of: Callable[..., Callable[..., Gradients]]) -> Callable[..., Gradients]:
        found = of(self.objective, self.ctx, self.slice_placement, self._batch_of_step, self.seed)
        for one in self.strategies:
            found = one.gradients(found)
        return found

    @property
    def step(self) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        """The step, not yet compiled; with local updates that of every slice alone."""
        if self.slices:
            return self.slices.step(self.gradients)
        return step_function(self.gradients, self.update, self.placement)

    @property
    def slices(self) -> Slices | None:
        """The programs of slices that train alone; None without local updates."""
        local = self.ctx.local
        if local is None:
            return None
        return Slices(local, self.ctx, self.slice_placement, self.placement, self.update, self.seed)

    @property
    def given(self) -> dict[str, Any]:
        """Further inputs of every step, as structs."""
        return {name: structs for one in self.strategies for name, structs in one.given.items()}

    def put(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Puts the arrays of a batch on the devices, sharded as the step needs them.

        Raises:
          DataError: the batch differs from the one that the step is compiled for.
        """
        check_batch(batch, self.batch)
        return {name: jax.device_put(arranged(x, self.order), self.batch[name].sharding) for name, x in batch.items()}

    def compile_step(self, options: dict[str, Any] | None = None) -> Step:
        """Compiles the step; nothing is allocated.

        Args:
          options: of the compiler, in addition to those of `ctx`.
        """
        options = self.ctx.compiler_options | (options or {})
        if self.slices:
            return self._compile_rounds(self.slices, options)
        training = self.on_prepared_states
        step = compile_step(training.step, training.placement, self.batch, self.given, options, self.stored_layers)
        return replace(step, order=self.order)

    def _compile_rounds(self, slices: Slices, options: dict[str, Any]) -> LocalStep:
        assert self.rounds, "a training with local updates has rounds"

        def compiled(step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]) -> Step:
            metrics = NamedSharding(self.mesh, PartitionSpec(slices.local.axis))  # pyright: ignore
            return compile_step(step, self.placement, self.batch, self.given, options, metrics=metrics)

        alone = slices.step(self.gradients)
        step = compiled(alone)
        reducing = []
        if slices.local.overlap_steps:
            reducing = [compiled(slices.reducing_step(alone, fragment)).program for fragment in slices.fragments]
        averaging = None
        if slices.local.start:
            together = self._gradients(partial(slice_gradients, averages=True))
            averaging = compiled(slices.step(together, averages=True)).program
        outer = tuple(compile_program(traced, options) for traced in slices.trace_outer())
        return LocalStep(
            step.program, self.batch, step.given, step.warnings, self.order, None, rounds=self.rounds, outer=outer,
            reducing=tuple(reducing), averaging=averaging,
        )  # fmt: skip

    def compile_evaluation(self) -> Evaluation:
        """Compiles the loss of a batch without gradients; nothing is allocated."""
        return compile_program(self._evaluation(self.ctx))

    def lazy_evaluation(self) -> LazyEvaluation:
        """The evaluation, traced and compiled at its first call."""
        return LazyEvaluation(partial(self._evaluation, self.ctx))

    def lazy_row_results(self) -> LazyEvaluation | None:
        """What metrics of all rows together need of each row, compiled at its first call; None if there are none."""
        of_rows = self.of_rows
        if of_rows is None:
            return None
        ctx = replace(self.ctx, manual=False)
        specs = self.batch_specs
        return LazyEvaluation(lambda: trace_row_results(of_rows, ctx, self.placement, specs, self._unseen))

    @cached_property
    def model_flops(self) -> Fraction:
        """The FLOPs that the model needs for a batch, from which model FLOPs utilization (MFU) is computed.

        They are three times the FLOPs of the matrix products in an evaluation that is traced under GSPMD, because the
        backward needs twice the FLOPs of the forward. Frozen parameters count as if they were trained. Half of the
        scores of meshpar's causal attention count; an imported model's attention counts as it is traced.

        Raises:
          ProgramError: the model multiplies in a `while` of unknown length.
        """
        forward = self._evaluation(replace(self.ctx, manual=False)).jaxpr
        return 3 * needed_flops(traced_products(forward))

    def _evaluation(self, ctx: ParallelContext) -> jax.stages.Traced:
        loss = self.evaluation or self.loss
        training = replace(self, ctx=ctx)
        objective = training._objective(loss, training._pipeline(training._staged(loss, self.batch_specs, None, ctx)))
        return trace_evaluation(objective, ctx, self.placement, self.batch_specs)

    def compile_init(self, options: Any = None, given: dict[str, jax.Array] | None = None) -> Callable[[], TrainState]:
        """Compiles a function that initializes the state, sharded: each device computes only its own shards.

        Args:
          options: of the compiler; by default few optimizations on CPUs.
          given: existing arrays by path, such as `params.head.kernel`. They are donated, and replace initialized ones.
        """
        slices, placed = self.slices, self.slice_placement.carried

        def init_others(params: Any, key: jax.Array) -> tuple[Any, Any]:
            trained = without(params, self.placement.frozen)
            opt_state = self.update.tx.init(trained)
            with self._of_the_model():
                carried = self.init_carried(key)
            for one in self.strategies:
                if one.key in placed:
                    carried = carried | {one.key: one.initial(params, placed[one.key])}
            if slices is None:
                return opt_state, carried
            own = slices.initial(trained, opt_state, carried)
            return slices.local.outer.build().init(trained), {SLICES: own}

        def init(key: jax.Array) -> Any:
            with self._of_the_model():
                return self.init(key)

        return compile_init(init, init_others, self.placement, self.seed, options, given)

    @property
    def drawn(self) -> Any:
        """The types of the first parameters, as `init` draws them."""
        with self._of_the_model():
            return jax.eval_shape(self.init, jax.random.key(0))


def step_key(seed: int, step: jax.Array) -> jax.Array:
    """The random key of a step, the same on all devices."""
    return jax.random.fold_in(jax.random.key(seed), step)
