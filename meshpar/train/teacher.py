"""Runs a teacher in its student's step. Its parameters are not trained, and are sharded by rules of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax

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
    other. If both models' rules shard `batch` and `vocab` alike, no communication is needed for that.

    Args:
      apply: (params, batch, key) -> logits [batch, seq, vocab], local shards of the vocabulary.
      specs: tree of `ArraySpec`, of the teacher's parameters.
      rules: of the teacher's parameters and activations.
      student: the context of the step; the teacher has the same mesh and compute dtype.
      batch_specs: name -> `ArraySpec` of an array of a batch.
      vocab: rows of both models' vocabulary with padding.

    Memory: the teacher's parameters, sharded by its rules; and its logits for all rows of a step, in the compute dtype.
    Communication: that of one forward per step: ZeRO-2 and -3 gather once, ZeRO-1 never.
    """

    apply: Callable[..., jax.Array]
    specs: Any
    rules: AxisRules
    student: ParallelContext
    batch_specs: dict[str, ArraySpec]
    vocab: int

    @cached_property
    def ctx(self) -> ParallelContext:
        """The student's context with the teacher's rules, and all rows of a step at once."""
        return replace(self.student, rules=self.rules, num_microbatches=1)

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
        """Whether the teacher's logits are sharded like the student's."""
        return all(self.ctx.axes(dim) == self.student.axes(dim) for dim in LOGITS)

    def teaching(self, gradients: Callable[..., Gradients]) -> Callable[..., Gradients]:
        """Replaces the teacher's parameters in a batch by its logits before the gradients are computed."""

        def taught(params: Any, batch: Batch, step: jax.Array, carried: Any) -> Gradients:
            own = {name: x for name, x in batch.items() if name != TEACHER}
            return gradients(params, own | {TEACHER: self(batch[TEACHER], own)}, step, carried)

        return taught

    def __call__(self, params: Any, batch: Batch) -> jax.Array:
        """The logits of a batch, the global array [batch, seq, vocab]."""
        dims = jax.tree.map(lambda spec: spec.dims, self.specs)

        def local(params: Any, batch: Batch) -> jax.Array:
            return self.apply(data.gather_params(params, dims), batch, None).astype(self.logits.dtype)

        in_specs = (pspecs(self.placement), batch_pspecs(self.ctx, self.batch_specs))
        return on_shards(local, self.ctx, in_specs, self.ctx.pspec(*LOGITS))(params, batch)
