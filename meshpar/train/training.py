"""A training: a loss, an optimizer and a mesh, worked out as far as it goes without a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.collectives.reduction import Reduce
from meshpar.cost.flops import needed_flops, traced_products
from meshpar.optim.freeze import for_good
from meshpar.parallel.pipeline.execute import Pipeline
from meshpar.sharding.constrain import Lowering
from meshpar.sharding.overlap import Overlap
from meshpar.sharding.resolve import AnyMesh
from meshpar.sharding.rules import AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.train.batches import check_batch
from meshpar.train.evaluate import Evaluation, trace_evaluation
from meshpar.train.gradients import Gradients, Objective, auto, manual, stale
from meshpar.train.kept import place_kept, zeros
from meshpar.train.loss import TEACHER, Batch, Loss
from meshpar.train.state import StatePlacement, TrainState, compile_init, place
from meshpar.train.step import Metrics, Step, Update, batch_structs, compile_step, step_function
from meshpar.train.teacher import Teacher


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a step computes, and where: the same declaration on another mesh is `replace(training, mesh=...)`.

    Args:
      specs: tree of `ArraySpec`, of the parameters as they are stored.
      init: key -> the first parameters, of any dtype.
      loss: (params, batch, key, carried) -> `Tally` of the rows at hand.
      update: the optimizer.
      batch_specs: name -> `ArraySpec` of an array of a batch; its first dim is `batch`.
      mesh: real or abstract.
      rules: dim -> axes.
      manual: whether the step is one `shard_map`, for a loss that is written for local shards; else GSPMD's.
      key: step -> the step's random key; None where the loss draws nothing.
      dtype: in which the loss is computed.
      sums: in which gradients are summed over microbatches and devices; None for float32 at least.
      seed: of the first parameters, and of gradients that are rounded by chance.
      num_microbatches: how many parts a batch is computed in, one after the other.
      overlap: what the manual lowering communicates in chunks while others are multiplied.
      pipeline: the model in stages, each of these parts in microbatches of its own; None without.
      carried: tree of `ArraySpec`, of what the loss hands from step to step beside the parameters.
      init_carried: key -> the first of it.
      frozen: how many steps each parameter is frozen, see `freeze.frozen_until`; None where none is.
      teacher: a model whose logits the loss finds in the batch; each step is given its parameters.
      evaluation: the loss where nothing is learned; default: `loss` without a key.
      reduce: how the manual lowering sums gradients; None leaves it to XLA.
      slow: axes that go across slices.
      activation_dims: names that only activations have, beside those of the batch: the rules may name them. None where
        the model is meshpar's own.
    """

    specs: Any
    init: Callable[[jax.Array], Any]
    loss: Loss
    update: Update
    batch_specs: dict[str, ArraySpec]
    mesh: AnyMesh
    rules: AxisRules
    manual: bool = False
    key: Callable[[jax.Array], jax.Array] | None = None
    dtype: Any = jnp.float32
    sums: Any = None
    seed: int = 0
    num_microbatches: int = 1
    overlap: Overlap = field(default_factory=Overlap)
    pipeline: Pipeline | None = None
    carried: Any = field(default_factory=dict)
    init_carried: Callable[[jax.Array], Any] = lambda key: {}
    frozen: Any = None
    teacher: Teacher | None = None
    evaluation: Loss | None = None
    reduce: Reduce | None = None
    slow: tuple[str, ...] = ()
    activation_dims: tuple[str, ...] | None = None

    @cached_property
    def placement(self) -> StatePlacement:
        dims = None if self.activation_dims is None else {*self.activation_dims, *self._batch_dims}
        placed = place(self.specs, self.rules, self.mesh, self.update.tx, self.carried, for_good(self.frozen), dims)
        kept = place_kept(placed.trained, self.how)
        return replace(placed, carried=placed.carried | kept) if kept else placed

    @property
    def _batch_dims(self) -> set[str]:
        return {dim for spec in self.batch_specs.values() for dim in spec.dims if dim}

    @cached_property
    def how(self) -> Lowering:
        passes = self.num_microbatches * (self.pipeline.schedule.num_microbatches if self.pipeline else 1)
        return Lowering(
            self.mesh, self.rules, self.manual, self.dtype, self.sums, passes, self.reduce, self.slow, self.overlap,
            self.activation_dims or (),
        )  # fmt: skip

    @cached_property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a batch, as structs with shardings."""
        return batch_structs(self.how, self.batch_specs)

    @property
    def objective(self) -> Objective:
        key = self.key or (lambda step: None)
        pipeline = self.pipeline if self.manual else None
        return Objective(self.loss, key, self.num_microbatches, self.dtype, self.sums, self.frozen, pipeline)

    @property
    def gradients(self) -> Callable[..., Gradients]:
        """(params, batch, step, carried) -> `Gradients`; with a teacher, the batch holds its parameters."""
        specs = self.batch_specs | ({TEACHER: self.teacher.logits} if self.teacher else {})
        if self.manual:
            found = manual(self.objective, self.how, self.placement, batch_structs(self.how, specs), self.seed)
        else:
            found = auto(self.objective, self.how)
        if self.manual and self.pipeline and self.pipeline.schedule.is_stale:
            found = stale(found)
        return self.teacher.teaching(found) if self.teacher else found

    @property
    def step(self) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        """The step, not yet compiled."""
        return step_function(self.gradients, self.update, self.placement)

    def put(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """The arrays of a batch on the devices, each device its own rows.

        Raises:
          DataError: the batch is not like the one that the step is compiled for.
        """
        check_batch(batch, self.batch)
        return {name: jax.device_put(x, self.batch[name].sharding) for name, x in batch.items()}

    def compile_step(self, options: dict[str, Any] | None = None) -> Step:
        given = {TEACHER: self.teacher.structs} if self.teacher else {}
        return compile_step(self.step, self.placement, self.batch, given, options)

    def compile_evaluation(self) -> Evaluation:
        return self._evaluation(self.how).lower().compile()

    @cached_property
    def model_flops(self) -> Fraction:
        """Operations that the model needs for a batch, by which model FLOPs utilization (MFU) is stated.

        They are three times those of the products in an evaluation, as traced under GSPMD: the backward needs twice
        those of the forward, as if all parameters were trained. Our causal attention, which computes all scores, counts
        half. That of an imported model counts as it is traced.

        Raises:
          ProgramError: the model multiplies in a `while` of unknown length.
        """
        forward = self._evaluation(replace(self.how, manual=False)).jaxpr
        return 3 * needed_flops(traced_products(forward))

    def _evaluation(self, how: Lowering) -> jax.stages.Traced:
        objective = replace(self.objective, loss=self.evaluation or self.loss)
        return trace_evaluation(objective, how, self.placement, self.batch)

    def compile_init(self, options: Any = None, given: dict[str, jax.Array] | None = None) -> Callable[[], TrainState]:
        kept = place_kept(self.placement.trained, self.how)
        first = (lambda key: self.init_carried(key) | zeros(kept)) if kept else self.init_carried
        return compile_init(self.init, first, self.update.tx, self.placement, self.seed, options, given)


def step_key(seed: int, step: jax.Array) -> jax.Array:
    """The random key of a step, the same on all devices."""
    return jax.random.fold_in(jax.random.key(seed), step)
