"""A training: a loss, an optimizer and a mesh, prepared as far as possible without a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.cost.flops import needed_flops, traced_products
from meshpar.errors import ConfigError
from meshpar.nn.recognized import Found, rewritten, with_attention
from meshpar.optim.freeze import for_good
from meshpar.parallel.batch import Batch
from meshpar.parallel.context import ParallelContext, tracing
from meshpar.parallel.pipeline.execute import Pipeline
from meshpar.parallel.rounds import Rounds
from meshpar.parallel.trainable import without
from meshpar.partition.loss import PartitionedLoss, of_whole_arrays
from meshpar.partition.moved_values import MovedValue, moved_values
from meshpar.partition.rules.loops import unrolls
from meshpar.partition.stages import StagedLoss
from meshpar.sharding.resolve import AnyMesh, platform_of
from meshpar.sharding.rules import AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.train.batches import arranged, check_batch, token_order
from meshpar.train.error_feedback import REDUCE, SLICES, ErrorFeedback
from meshpar.train.evaluate import Evaluation, LazyEvaluation, trace_evaluation, trace_row_results
from meshpar.train.fragments import check_fragments
from meshpar.train.gradients import Gradients, Objective, gradients
from meshpar.train.local_step import LocalStep
from meshpar.train.loss import Loss, of_shards
from meshpar.train.program import batch_structs, compile_program, with_rows
from meshpar.train.slices import Slices, place_slices, slice_gradients
from meshpar.train.stage_cut import describe_cut, product_flops
from meshpar.train.stale_weights import StaleWeights
from meshpar.train.state import StatePlacement, TrainState, compile_init, place, place_opt_state
from meshpar.train.step import Metrics, Step, Update, compile_step, step_function
from meshpar.train.stored_layers import LAYERS, LayerArrays, LayerOrder, StoredLayers, cut_loss, has_stacks
from meshpar.train.strategy import Strategy, of_loss


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training step and its mesh. `training.on(mesh=...)` is the same training on another mesh.

    Args:
      specs: tree of `ArraySpec`, of the parameters as they are stored.
      init: key -> the first parameters, in any dtype.
      loss: (params, batch, key, carried) -> `LossSums` of the local rows.
      update: applies the optimizer.
      batch_specs: name -> `ArraySpec` of an array of a batch; its first dim is `batch`.
      ctx: mesh, rules, lowering, strategies, precisions and number of microbatches.
      key: step -> the step's random key; None if the loss uses no randomness.
      seed: for the first parameters, and for gradients with stochastic rounding.
      carried: tree of `ArraySpec`, of the state other than parameters that the loss passes from step to step.
      init_carried: key -> the first carried state.
      frozen: for how many steps each parameter is frozen, see `freeze.frozen_until`; None if none is.
      frozen_rows: which layers of stacks are frozen, see `frozen_layers`; None if none is.
      is_offloaded: whether the optimizer's state is stored in the host's memory between steps.
      added: strategies that do not follow from `ctx`, such as a teacher; see `strategies`.
      evaluation: the loss for evaluations; default: `loss` without a key.
      of_rows: (params, batch, key, carried) -> what metrics of all rows together need; None if there are none.
      in_schedule_order: whether parameters and gradients have their layers in the order of the pipeline's schedule,
        see `on_prepared_states`.
      rounds: when the rounds of local updates end; None without them.
      is_of_whole_arrays: whether the losses are written for whole arrays: in the manual lowering `partition` makes them
        ones of local shards. Only a user's own may be written for local shards.
      reads_positions: whether the losses read the places of tokens from the batch, so that rows may have another order.
    """

    specs: Any
    init: Callable[[jax.Array], Any]
    loss: Loss
    update: Update
    batch_specs: dict[str, ArraySpec]
    ctx: ParallelContext
    key: Callable[[jax.Array], jax.Array] | None = None
    seed: int = 0
    carried: Any = field(default_factory=dict)
    init_carried: Callable[[jax.Array], Any] = lambda key: {}
    frozen: Any = None
    frozen_rows: Any = None
    is_offloaded: bool = False
    added: tuple[Strategy, ...] = ()
    evaluation: Loss | None = None
    of_rows: Callable[..., dict[str, jax.Array]] | None = None
    in_schedule_order: bool = False
    rounds: Rounds | None = None
    is_of_whole_arrays: bool = False
    reads_positions: bool = False

    def on(self, **changes: Any) -> Self:
        """Returns the same training with changes to its context, `ctx`, such as another mesh or lowering."""
        return replace(self, ctx=replace(self.ctx, **changes))

    @property
    def mesh(self) -> AnyMesh:
        return self.ctx.mesh

    @property
    def rules(self) -> AxisRules:
        return self.ctx.rules

    @cached_property
    def strategies(self) -> tuple[Strategy, ...]:
        """What changes the step besides the loss and the optimizer, from the inside out."""
        of_ctx = (one for kind in (ErrorFeedback, StaleWeights) if (one := kind.of(self.ctx)))
        return (*of_ctx, *self.added)

    @property
    def _unseen(self) -> frozenset[str]:
        """The keys of the carried state that the loss does not get."""
        return frozenset({SLICES, *(one.key for one in self.strategies if one.key and not one.is_of_loss)})

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
        dims = None
        if self.ctx.activation_dims is not None:
            of_batch = {dim for spec in self.batch_specs.values() for dim in spec.dims if dim}
            dims = {*self.ctx.activation_dims, *of_batch}
            if self.is_of_whole_arrays and self.ctx.manual and "seq" in of_batch:
                dims.add("residual_seq")  # the partitioner ends sums in shards of the sequence
            if self.is_of_whole_arrays and self.ctx.schedule:
                dims.add("stage")  # the loss is cut into stages
        frozen = for_good(self.frozen)
        placed = place(self.specs, self.rules, self.mesh, self.update.tx, self.carried, frozen, dims, self.is_offloaded)
        states = {one.key: one.placed(placed) for one in self.strategies if one.key}
        states = {key: placements for key, placements in states.items() if placements}
        return replace(placed, carried=placed.carried | states) if states else placed

    @cached_property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a batch, as structs with shardings."""
        return batch_structs(self.ctx, self.batch_specs)

    @property
    def order(self) -> np.ndarray | None:
        """int[seq]: the token of a row at each place of its shards; None if rows keep their order.

        A loss of whole arrays keeps it if it numbers the tokens of a row itself.
        """
        is_kept = self.is_of_whole_arrays and not self.reads_positions
        return None if is_kept else token_order(self.ctx, self.batch_specs)

    @cached_property
    def pipeline(self) -> Pipeline | None:
        """The model in stages and its schedule; None without stages or under GSPMD."""
        return self._pipeline(self._staged(self.loss, self._batch_of_step, self.key, self.ctx.in_slice))

    def _pipeline(self, stages: StagedLoss | None) -> Pipeline | None:
        schedule = self.ctx.schedule
        return Pipeline(stages, schedule, self.in_schedule_order) if stages and schedule else None

    def _staged(self, loss: Loss, batch: dict[str, ArraySpec], key: Any, ctx: ParallelContext) -> StagedLoss | None:
        """The loss, cut into stages where it is traced; None without a pipeline."""
        if not ctx.schedule:
            return None
        key = jax.eval_shape(key, jnp.int32(0)) if key else None
        whole = self._whole(loss, batch)
        return StagedLoss(whole, ctx, key, product_flops)

    def _whole(self, loss: Loss, batch: dict[str, ArraySpec]) -> PartitionedLoss:
        """A loss of whole arrays, partitioned, with the state of strategies that it reads."""
        copies = self._copies
        carried = self.carried | dict.fromkeys(copies, self.specs) if copies else self.carried
        # The attention of meshpar's own decoders is an operation already.
        rewrite = (lambda closed: closed) if self.reads_positions else with_attention
        return PartitionedLoss(loss, self.specs, batch, carried, rewrite, copies)

    @property
    def _copies(self) -> tuple[str, ...]:
        """The keys of the carried state under which the loss reads copies of the parameters."""
        return tuple(one.key for one in self.strategies if one.key and one.is_of_loss)

    @property
    def _batch_of_step(self) -> dict[str, ArraySpec]:
        """The arrays that a step's loss reads. An evaluation has no teacher."""
        return self.batch_specs | {name: spec for one in self.strategies for name, spec in one.arrays.items()}

    def in_stages(self) -> Self:
        """The same training, whose pipeline is checked; without a pipeline itself.

        The dim of the layers that it cuts is called `layers` in `specs`.

        Raises:
          ConfigError: the loss cannot be cut into its stages.
        """
        staged = self._staged(self.loss, self._batch_of_step, self.key, self.ctx)
        if not staged or not self.is_of_whole_arrays:
            return self
        named = replace(self, specs=staged.with_named_layers())
        assert named.pipeline
        named.pipeline.plan(named.ctx)
        return named

    @property
    def described_cut(self) -> str | None:
        """How a pipeline cuts the loss into stages, as text; None without one."""
        return describe_cut(self.pipeline, self.ctx) if self.pipeline else None

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

    @cached_property
    def attention(self) -> list[Found]:
        """The attention of a user's own model: what a core computes, and what is left as it is written, and why."""
        is_recognized = self.is_of_whole_arrays and not self.reads_positions
        return rewritten(self._traced_loss)[1] if is_recognized and self.ctx.manual else []

    def check_context(self) -> None:
        """Raises ConfigError if no core computes some attention of the rows that devices of a user's model share."""
        if self.ctx.activation_dims is None or self.ctx.parallel.context is None:
            return
        dims = [pair for spec in self.batch_specs.values() for pair in zip(spec.dims, spec.shape, strict=True)]
        shared = {size for dim, size in dims if dim and dim != "batch" and self.ctx.axes(dim)}
        left = [one for one in self.attention if not one.band and one.num_keys in shared]
        if not left and any(one.band for one in self.attention):
            return
        found = "".join(f"\n  {one}" for one in left or self.attention)
        found = found or ": meshpar recognizes no attention in this loss"
        if not self.is_of_whole_arrays:
            found = ": a loss for local shards meets the other shards of a row itself"
        what = "parallel.context is not for this model" if left else "parallel.context has no effect"
        raise ConfigError(f"{what}{found}\n  no parallel.context, or meshpar.attention.attend")

    @cached_property
    def _traced_loss(self) -> ClosedJaxpr:
        key = jax.eval_shape(self.key, jnp.int32(0)) if self.key else None
        whole = self._whole(self.loss, self.batch_specs)
        params, carried = jax.tree.map(lambda spec: spec.struct, (whole.params, whole.carried))
        with of_whole_arrays(self.ctx) if self.ctx.manual else tracing(self.ctx):
            return jax.make_jaxpr(self.loss)(params, jax.eval_shape(with_rows, self.batch), key, carried)

    @property
    def _reads_layers_alone(self) -> bool:
        """Whether the step computes the layers of a stack without a loop."""
        on = platform_of(self.mesh) or "cpu"
        if on != "cpu" or not self.is_of_whole_arrays or not has_stacks(self.specs):
            return False
        return unrolls(self._traced_loss.jaxpr, on if self.ctx.manual else None)

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
        loss = self._whole(loss, self._batch_of_step) if self.is_of_whole_arrays else of_shards(loss)
        key = self.key or (lambda step: None)
        return Objective(loss, key, self.frozen, self.frozen_rows, pipeline, self._unseen, self._copies)

    @cached_property
    def activations(self) -> list[MovedValue]:
        """The activations that a forward pass moves between devices, in the manual lowering. Needs no devices.

        Raises:
          ConfigError: the loss is written for local shards.
        """
        if not self.is_of_whole_arrays:
            what = "a loss that is written for local shards moves activations by collectives of its own"
            raise ConfigError(f"{what}; meshpar inspect lists them")
        ctx = replace(self.ctx, manual=True, num_microbatches=1, strict=False)
        loss = self._whole(self.loss, self.batch_specs)
        key = jax.eval_shape(self.key, jnp.int32(0)) if self.key else None
        batch = jax.eval_shape(with_rows, self.batch)
        structs = (self.placement.params, of_loss(self.placement.carried, self._unseen))
        params, carried = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.spec.shape, p.spec.dtype), structs)
        return moved_values(loss.plan(ctx, (params, batch, key, carried)), ctx.axes("residual_seq"))

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

    def _of_the_model(self) -> AbstractContextManager[None]:
        """The context in which a user's init is traced: it may need the mesh."""
        return tracing(replace(self.ctx, manual=False)) if self.is_of_whole_arrays else nullcontext()


def step_key(seed: int, step: jax.Array) -> jax.Array:
    """The random key of a step, the same on all devices."""
    return jax.random.fold_in(jax.random.key(seed), step)
