"""Runs a teacher in its student's step. Its parameters are not trained, and are sharded by rules of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec

from meshpar.mesh.varying import Axes
from meshpar.parallel import data
from meshpar.parallel.batch import TEACHER, TEACHER_HEAD, Batch
from meshpar.parallel.context import ParallelContext, constrain
from meshpar.parallel.outputs import OutputProjection, Outputs
from meshpar.partition.function import PartitionedFunction
from meshpar.sharding.rules import AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.train.gradients import Gradients
from meshpar.train.program import batch_pspecs, on_shards, pspecs, structs
from meshpar.train.state import place
from meshpar.train.strategy import Strategy

DIMS = {TEACHER: ("batch", "seq", "embed"), TEACHER_HEAD: ("embed", "vocab")}


@dataclass(frozen=True)
class Teacher(Strategy):
    """The forward of another model on the same batch, compiled into the step and not differentiated.

    Its last hidden states and its output projection become arrays of the batch, sharded by the student's rules. The
    loss multiplies them in its chunks of tokens, so no device holds all of the teacher's logits. If both models' rules
    shard `batch`, `seq` and `vocab` alike, no communication is needed for that. A teacher is not cut into stages:
    beside a pipeline, each stage computes some of the rows, see `unstaged`.

    Args:
      apply: (params, batch, key) -> `Outputs` with a `OutputProjection`.
      specs: tree of `ArraySpec`, of the teacher's parameters.
      rules: of the teacher's parameters and activations.
      student: the context of the step; the teacher has the same mesh and compute dtype.
      batch_specs: name -> `ArraySpec` of an array of a batch.
      vocab: rows of both models' vocabulary with padding.
      hidden_size: width of the teacher's hidden states.

    Memory: the teacher's parameters, sharded by its rules. In the compute dtype: its hidden states for all rows of a
      step, and its output projection, sharded in the vocabulary alone.
    Communication: that of one forward per step: ZeRO-2 and -3 gather once, ZeRO-1 never. An all-gather of the hidden
      states over the axes that shard the rows of the teacher, but not those of the student.
    """

    apply: Callable[..., Outputs]
    specs: Any
    rules: AxisRules
    student: ParallelContext
    batch_specs: dict[str, ArraySpec]
    vocab: int
    hidden_size: int

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
    def given(self) -> dict[str, Any]:
        """The teacher's parameters."""
        return {TEACHER: structs(self.placement)}

    @property
    def arrays(self) -> dict[str, ArraySpec]:
        """The arrays that are added to a batch."""
        batch, seq = next(iter(self.batch_specs.values())).shape[:2]
        shapes = {TEACHER: (batch, seq, self.hidden_size), TEACHER_HEAD: (self.hidden_size, self.vocab)}
        dtype = np.dtype(self.ctx.compute_dtype)
        return {name: ArraySpec(shape, dtype, DIMS[name]) for name, shape in shapes.items()}

    def is_countable(self, ctx: ParallelContext) -> bool:
        """Whether the arrays are sharded by the student's rules, after they are gathered."""
        rows = ctx.axes("batch") + self._gathered_axes == self.ctx.axes("batch")
        return rows and all(self.ctx.axes(dim) == ctx.axes(dim) for dim in ("seq", "embed", "vocab"))

    @property
    def _gathered_axes(self) -> Axes:
        """The axes over which the teacher's rows are sharded, but not the student's, in the manual lowering."""
        own = self.student.axes("batch")
        axes = self.ctx.axes("batch")
        return axes[len(own) :] if self.ctx.manual and axes[: len(own)] == own else ()

    def gradients(self, gradients: Callable[..., Gradients]) -> Callable[..., Gradients]:
        """Those where the teacher's arrays replace its parameters in the batch first."""

        def taught(params: Any, batch: Batch, step: jax.Array, carried: Any) -> Gradients:
            own = {name: x for name, x in batch.items() if name != TEACHER}
            return gradients(params, own | self(batch[TEACHER], own), step, carried)

        return taught

    def __call__(self, params: Any, batch: Batch) -> Batch:
        """Computes the arrays that are added to a batch, as global arrays."""
        dims = jax.tree.map(lambda spec: spec.dims, self.specs)
        rows = self.student if self._gathered_axes else self.ctx
        axes = {name: tuple(map(self.ctx.axes, dims)) for name, dims in DIMS.items()}
        axes[TEACHER] = (rows.axes("batch"), *axes[TEACHER][1:])
        in_specs = (pspecs(self.placement), batch_pspecs(self.ctx, self.batch_specs))
        own = {name: spec.dims for name, spec in self.batch_specs.items()} | {"rows": ("batch",)}
        of_batch = [tuple(map(self.ctx.axes, own[name])) for name in sorted(batch)]
        results = [axes[name] for name in sorted(axes)]
        function = PartitionedFunction(self._of_whole_arrays, self.specs, of_batch, results)

        def local(params: Any, batch: Batch) -> Batch:
            return function(data.gather_params(params, dims), batch)

        out_specs = {name: PartitionSpec(*(x or None for x in of)) for name, of in axes.items()}
        return on_shards(local, self.ctx, in_specs, out_specs)(params, batch)

    def _of_whole_arrays(self, params: Any, batch: Batch) -> Batch:
        projected = self.apply(params, batch, None).projected
        assert isinstance(projected, OutputProjection), "a model with a vocabulary projects to it"
        found = {TEACHER: projected.hidden, TEACHER_HEAD: projected.head}
        return {name: constrain(x.astype(self.ctx.compute_dtype), *DIMS[name]) for name, x in found.items()}


def unstaged(rules: AxisRules) -> AxisRules:
    """The rules of a model that is not cut into stages: the axes of stages shard the rows of the batch instead."""
    stage = rules.table.get("stage", ())
    if not stage:
        return rules
    instead = {"stage": (), "layers": (), "batch": rules["batch"] + stage}
    return AxisRules(preset=rules.preset, zero=rules.zero, **rules.explicit | instead)
