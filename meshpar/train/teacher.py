"""Runs a teacher in its student's step. Its parameters are not trained, and are sharded by rules of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.mesh.varying import Axes, invariant
from meshpar.parallel import data
from meshpar.parallel.context import ParallelContext
from meshpar.sharding.rules import AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.train.gradients import Gradients
from meshpar.train.loss import TEACHER, Batch
from meshpar.train.program import batch_pspecs, on_shards, pspecs, structs
from meshpar.train.state import place

LOGITS = ("batch", "seq", "vocab")


@dataclass(frozen=True)
class Teacher:
    """The forward of another model on the same batch, compiled into the step and not differentiated.

    Its logits become an array of the batch, sharded by the student's rules, and are split into microbatches like any
    other. If both models' rules shard `batch` and `vocab` alike, no communication is needed for that. A teacher is not
    cut into stages: beside a pipeline, each stage computes some of the rows, see `unstaged`.

    Args:
      apply: (params, batch, key) -> logits [batch, seq, vocab], local shards of the vocabulary.
      specs: tree of `ArraySpec`, of the teacher's parameters.
      rules: of the teacher's parameters and activations.
      student: the context of the step; the teacher has the same mesh and compute dtype.
      batch_specs: name -> `ArraySpec` of an array of a batch.
      vocab: rows of both models' vocabulary with padding.

    Memory: the teacher's parameters, sharded by its rules; and its logits for all rows of a step, in the compute dtype.
    Communication: that of one forward per step: ZeRO-2 and -3 gather once, ZeRO-1 never. An all-gather of the logits
      over the axes that shard the rows of the teacher, but not those of the student.
    """

    apply: Callable[..., jax.Array]
    specs: Any
    rules: AxisRules
    student: ParallelContext
    batch_specs: dict[str, ArraySpec]
    vocab: int

    @cached_property
    def ctx(self) -> ParallelContext:
        """The student's context with the teacher's rules, without stages, and all rows of a step at once."""
        parallel = self.student.parallel.model_copy(update={"pipeline": None})
        return replace(self.student, rules=self.rules, parallel=parallel, num_microbatches=1)

    @cached_property
    def placement(self) -> Any:
        """Tree of `Placement`, of the teacher's stored parameters."""
        return place(self.specs, self.rules, self.student.mesh, optax.identity()).params

    @property
    def structs(self) -> Any:
        """The parameters as the structs that a step is compiled for."""
        return structs(self.placement)

    @cached_property
    def logits(self) -> ArraySpec:
        shape = next(iter(self.batch_specs.values())).shape[:2]
        return ArraySpec((*shape, self.vocab), np.dtype(self.ctx.compute_dtype), LOGITS)

    @property
    def is_aligned(self) -> bool:
        """Whether the teacher's logits are sharded like the student's, after they are gathered."""
        own = (self.student.axes("batch") + self._gathered_axes, self.student.axes("seq"), self.student.axes("vocab"))
        return tuple(self.ctx.axes(dim) for dim in LOGITS) == own

    @property
    def _gathered_axes(self) -> Axes:
        """The axes over which the teacher's rows are sharded, but not the student's, in the manual lowering."""
        own = self.student.axes("batch")
        axes = self.ctx.axes("batch")
        return axes[len(own) :] if self.ctx.manual and axes[: len(own)] == own else ()

    def teaching(self, gradients: Callable[..., Gradients]) -> Callable[..., Gradients]:
        """Replaces the teacher's parameters in a batch by its logits before the gradients are computed."""

        def taught(params: Any, batch: Batch, step: jax.Array, carried: Any) -> Gradients:
            own = {name: x for name, x in batch.items() if name != TEACHER}
            return gradients(params, own | {TEACHER: self(batch[TEACHER], own)}, step, carried)

        return taught

    def __call__(self, params: Any, batch: Batch) -> jax.Array:
        """The logits of a batch, the global array [batch, seq, vocab]."""
        dims = jax.tree.map(lambda spec: spec.dims, self.specs)

        gathered = self._gathered_axes

        def local(params: Any, batch: Batch) -> jax.Array:
            logits = self.apply(data.gather_params(params, dims), batch, None).astype(self.logits.dtype)
            return invariant(lax.all_gather(logits, gathered, tiled=True), gathered) if gathered else logits

        in_specs = (pspecs(self.placement), batch_pspecs(self.ctx, self.batch_specs))
        rows = self.student if gathered else self.ctx
        out_spec = PartitionSpec(*rows.pspec("batch"), *self.ctx.pspec("seq", "vocab"))
        return on_shards(local, self.ctx, in_specs, out_spec)(params, batch)


def unstaged(rules: AxisRules) -> AxisRules:
    """The rules of a model that is not cut into stages: the axes of stages shard the rows of the batch instead."""
    stage = rules.table.get("stage", ())
    if not stage:
        return rules
    instead = {"stage": (), "layers": (), "batch": rules["batch"] + stage}
    return AxisRules(preset=rules.preset, zero=rules.zero, **rules.explicit | instead)
