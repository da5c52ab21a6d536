"""A teacher in the step of its student: parameters that are never trained, where rules of their own put them."""

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
    """The forward of another model on the same batch, compiled into the step, outside of what is differentiated.

    What it gives is one more array of the batch, sharded as the student's rules say; so it is cut into microbatches
    like any other. If both models' rules shard `batch` and `vocab` alike, nothing is sent for that.

    Args:
      apply: (params, batch, key) -> logits [batch, seq, vocab], local shards of the vocabulary.
      specs: tree of `ArraySpec`, of its parameters.
      rules: of its parameters and activations.
      student: the context of the step; its mesh and compute dtype are the teacher's too.
      batch_specs: name -> `ArraySpec` of an array of a batch.
      vocab: rows of both models' vocabulary, padding included.

    Memory: its parameters as its rules shard them; and for all rows of a step its logits, in the dtype of the
      computation.
    Communication: that of a forward, once a step: ZeRO-2 and -3 gather once, ZeRO-1 never.
    """

    apply: Callable[..., jax.Array]
    specs: Any
    rules: AxisRules
    student: ParallelContext
    batch_specs: dict[str, ArraySpec]
    vocab: int

    @cached_property
    def ctx(self) -> ParallelContext:
        """The student's, with the teacher's rules: all rows of a step at once."""
        return replace(self.student, rules=self.rules, num_microbatches=1)

    @cached_property
    def placement(self) -> Any:
        """Tree of `Placement`, of its parameters as they are stored."""
        return place(self.specs, self.rules, self.student.mesh, optax.identity()).params

    @property
    def structs(self) -> Any:
        """What a step takes for its parameters."""
        return structs(self.placement)

    @cached_property
    def logits(self) -> ArraySpec:
        shape = next(iter(self.batch_specs.values())).shape[:2]
        return ArraySpec((*shape, self.vocab), np.dtype(self.ctx.compute_dtype), LOGITS)

    @property
    def is_aligned(self) -> bool:
        """Whether its logits come as the student needs them."""
        return all(self.ctx.axes(dim) == self.student.axes(dim) for dim in LOGITS)

    def teaching(self, gradients: Callable[..., Gradients]) -> Callable[..., Gradients]:
        """Puts the teacher's logits where a batch has its parameters."""

        def taught(params: Any, batch: Batch, step: jax.Array, carried: Any) -> Gradients:
            own = {name: x for name, x in batch.items() if name != TEACHER}
            return gradients(params, own | {TEACHER: self(batch[TEACHER], own)}, step, carried)

        return taught

    def __call__(self, params: Any, batch: Batch) -> jax.Array:
        """Logits [batch, seq, vocab] of a batch, the global array."""
        in_specs = (pspecs(self.placement), batch_pspecs(self.ctx, self.batch_specs))
        return on_shards(self._local, self.ctx, in_specs, self.ctx.pspec(*LOGITS))(params, batch)

    def _local(self, params: Any, batch: Batch) -> jax.Array:
        dims = jax.tree.map(lambda spec: spec.dims, self.specs)
        return self.apply(data.gather_params(params, dims), batch, None).astype(self.logits.dtype)
