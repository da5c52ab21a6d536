"""A loss on a mesh: how it is partitioned and cut into stages, and what its trace says. Needs no devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxprs_in_params

from meshpar.errors import ConfigError
from meshpar.nn.recognized import Found, rewritten, with_attention
from meshpar.nn.recognized.operation import TOKENS
from meshpar.parallel.context import ParallelContext, tracing
from meshpar.parallel.pipeline.execute import Pipeline
from meshpar.parallel.strategies import ExpertParallel
from meshpar.partition.loss import PartitionedLoss, of_whole_arrays
from meshpar.partition.moved_values import MovedValue, moved_values
from meshpar.partition.op import partitioned_p
from meshpar.partition.rules.loops import unrolls
from meshpar.partition.stages import StagedLoss
from meshpar.sharding.resolve import AnyMesh, platform_of
from meshpar.sharding.rules import AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.train.batches import token_order
from meshpar.train.error_feedback import SLICES, ErrorFeedback
from meshpar.train.loss import Loss
from meshpar.train.program import batch_structs, with_rows
from meshpar.train.stage_cut import describe_cut, product_flops
from meshpar.train.stale_weights import StaleWeights
from meshpar.train.stored_layers import has_stacks
from meshpar.train.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class LossOnMesh:
    """A loss, the arrays that it reads, and the mesh and the strategies with which it is computed.

    Args:
      specs: tree of `ArraySpec`, of the parameters as they are stored.
      loss: (params, batch, key, carried) -> `LossSums` of the local rows.
      batch_specs: name -> `ArraySpec` of an array of a batch; its first dim is `batch`.
      ctx: mesh, rules, lowering, strategies, precisions and number of microbatches.
      key: step -> the step's random key; None if the loss uses no randomness.
      carried: tree of `ArraySpec`, of the state other than parameters that the loss passes from step to step.
      added: strategies that do not follow from `ctx`, such as a teacher; see `strategies`.
      is_local: whether the loss is written for local shards. Else it is for whole arrays, and in the manual lowering
        `partition` makes it one of local shards.
      in_schedule_order: whether parameters and gradients have their layers in the order of the pipeline's schedule,
        see `Training.on_prepared_states`.
    """

    specs: Any
    loss: Loss
    batch_specs: dict[str, ArraySpec]
    ctx: ParallelContext
    key: Callable[[jax.Array], jax.Array] | None = None
    carried: Any = field(default_factory=dict)
    added: tuple[Strategy, ...] = ()
    is_local: bool = False
    in_schedule_order: bool = False

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

    @cached_property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a batch, as structs with shardings."""
        return batch_structs(self.ctx, self.batch_specs)

    @property
    def order(self) -> np.ndarray | None:
        """int[seq]: the token of a row at each place of its shards; None if rows keep their order."""
        return token_order(self.ctx, self.batch_specs)

    @property
    def _unseen(self) -> frozenset[str]:
        """The keys of the carried state that the loss does not get."""
        return frozenset({SLICES, *(one.key for one in self.strategies if one.key and not one.is_of_loss)})

    @property
    def _copies(self) -> tuple[str, ...]:
        """The keys of the carried state under which the loss reads copies of the parameters."""
        return tuple(one.key for one in self.strategies if one.key and one.is_of_loss)

    @property
    def _batch_of_step(self) -> dict[str, ArraySpec]:
        """The arrays that a step's loss reads. An evaluation has no teacher."""
        return self.batch_specs | {name: spec for one in self.strategies for name, spec in one.arrays.items()}

    @property
    def _activation_dims(self) -> set[str] | None:
        """The dims that only activations have; None for the standard ones."""
        if self.ctx.activation_dims is None:
            return None
        of_batch = {dim for spec in self.batch_specs.values() for dim in spec.dims if dim}
        dims = {*self.ctx.activation_dims, *of_batch}
        if not self.is_local and self.ctx.manual and "seq" in of_batch:
            dims.add("residual_seq")  # the partitioner ends sums in shards of the sequence
        if not self.is_local and self.ctx.schedule:
            dims.add("stage")  # the loss is cut into stages
        return dims

    # Stages ------------------------------------------------------------------------------------------------------

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

    def in_stages(self) -> Self:
        """The same training, whose pipeline is checked; without a pipeline itself.

        The dim of the layers that it cuts is called `layers` in `specs`.

        Raises:
          ConfigError: the loss cannot be cut into its stages.
        """
        staged = self._staged(self.loss, self._batch_of_step, self.key, self.ctx)
        if not staged or self.is_local:
            return self
        named = replace(self, specs=staged.with_named_layers())
        assert named.pipeline
        named.pipeline.plan(named.ctx)
        return named

    @property
    def described_cut(self) -> str | None:
        """How a pipeline cuts the loss into stages, as text; None without one."""
        return describe_cut(self.pipeline, self.ctx) if self.pipeline else None

    # The trace ---------------------------------------------------------------------------------------------------

    def _whole(self, loss: Loss, batch: dict[str, ArraySpec]) -> PartitionedLoss:
        """A loss of whole arrays, partitioned, with the state of strategies that it reads."""
        copies = self._copies
        carried = self.carried | dict.fromkeys(copies, self.specs) if copies else self.carried
        rewrite = with_attention if self._writes_attention else (lambda closed: closed)
        return PartitionedLoss(loss, self.specs, batch, carried, rewrite, copies)

    @property
    def _structs(self) -> tuple[Any, Any, Any, Any]:
        """The arguments of the loss, whole."""
        whole = self._whole(self.loss, self.batch_specs)
        params, carried = jax.tree.map(lambda spec: spec.struct, (whole.params, whole.carried))
        key = jax.eval_shape(self.key, jnp.int32(0)) if self.key else None
        return params, jax.eval_shape(with_rows, self.batch), key, carried

    @cached_property
    def _traced_loss(self) -> ClosedJaxpr:
        with of_whole_arrays(self.ctx) if self.ctx.manual else tracing(self.ctx):
            return jax.make_jaxpr(self.loss)(*self._structs)

    @cached_property
    def attention(self) -> list[Found]:
        """The attention that is written out: what a core computes, and what is left as it is written, and why."""
        return rewritten(self._traced_loss)[1] if self.ctx.manual and self._writes_attention else []

    @property
    def _writes_attention(self) -> bool:
        """Whether attention may be written out in the loss. One that reads positions from the batch has operations."""
        return not (self.is_local or self.ctx.reads_positions)

    @cached_property
    def activations(self) -> list[MovedValue]:
        """The activations that a forward pass moves between devices, in the manual lowering. Needs no devices.

        Raises:
          ConfigError: the loss is written for local shards.
        """
        if self.is_local:
            what = "a loss that is written for local shards moves activations by collectives of its own"
            raise ConfigError(f"{what}; meshpar inspect lists them")
        ctx = replace(self.ctx, manual=True, num_microbatches=1, strict=False)
        program = self._whole(self.loss, self.batch_specs).plan(ctx, self._structs)
        return moved_values(program, ctx.axes("residual_seq"))

    @property
    def _reads_layers_alone(self) -> bool:
        """Whether the step computes the layers of a stack without a loop."""
        on = platform_of(self.mesh) or "cpu"
        if on != "cpu" or self.is_local or not has_stacks(self.specs):
            return False
        return unrolls(self._traced_loss.jaxpr, on if self.ctx.manual else None)

    def check_strategies(self) -> None:
        """Checks that the operations of the loss use the strategies.

        Raises:
          ConfigError: no core computes some attention of rows that devices share, or no experts exchange tokens.
        """
        self._check_context()
        self._check_exchange()

    def _check_context(self) -> None:
        if self.ctx.parallel.context is None:
            return
        dims = [pair for spec in self.batch_specs.values() for pair in zip(spec.dims, spec.shape, strict=True)]
        shared = {size for dim, size in dims if dim and dim != "batch" and self.ctx.axes(dim)}
        left = [one for one in self.attention if not one.band and one.num_keys in shared]
        if not left and (any(one.band for one in self.attention) or self._has_cores):
            return
        found = "".join(f"\n  {one}" for one in left or self.attention)
        found = found or ": meshpar recognizes no attention in this loss"
        if self.is_local:
            found = ": a loss for local shards meets the other shards of a row itself"
        what = "parallel.context is not for this model" if left else "parallel.context has no effect"
        raise ConfigError(f"{what}{found}\n  no parallel.context, or meshpar.attention.attend")

    @property
    def _has_cores(self) -> bool:
        """Whether a core of meshpar computes attention in the loss as it is written: queries, keys and values."""
        if self.is_local:
            return False
        signatures = (one.params["signature"] for one in _operations(self._traced_loss.jaxpr, partitioned_p))
        return any(sum(TOKENS in labels for labels in signature.ins) >= 3 for signature in signatures)

    def _check_exchange(self) -> None:
        if self.ctx.parallel.expert in (None, ExpertParallel()):
            return
        if self._with_exchange("ragged") == self._with_exchange("gather"):
            what = "parallel.expert has no effect: no experts of this loss exchange all of their tokens"
            raise ConfigError(f"{what}\n  no parallel.expert, or meshpar.nn.experts.mixture with dispatch=dropless")

    def _with_exchange(self, kind: Any) -> Counter[str]:
        """How often each operation is in the loss, if experts exchange tokens in this way."""
        parallel = self.ctx.parallel.model_copy(update={"expert": ExpertParallel(kind=kind)})
        traced = self.on(parallel=parallel)._traced_loss
        return Counter(one.primitive.name for one in _operations(traced.jaxpr))

    def _of_the_model(self) -> AbstractContextManager[None]:
        """The context in which a user's init is traced: it may need the mesh."""
        return nullcontext() if self.is_local else tracing(replace(self.ctx, manual=False))


def _operations(jaxpr: Any, primitive: Any = None) -> Iterator[Any]:
    """The equations of a program and of those that it calls; those of one primitive, if it is given."""
    for eqn in jaxpr.eqns:
        if primitive in (None, eqn.primitive):
            yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from _operations(inner, primitive)
