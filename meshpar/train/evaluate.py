"""The loss on a batch, without gradients: the forward of the step, compiled on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.parallel import data
from meshpar.sharding.constrain import Lowering, lowering
from meshpar.train.gradients import Objective, batch_pspecs
from meshpar.train.loss import Batch
from meshpar.train.state import StatePlacement, structs
from meshpar.train.step import with_rows

Evaluation = Callable[[Any, Batch], dict[str, jax.Array]]
"""(params, batch) -> `loss_sum` f32[], `tokens` int32[], over all devices. Nothing is donated."""


def compile_evaluation(
    objective: Objective, how: Lowering, placement: StatePlacement, batch: dict[str, jax.ShapeDtypeStruct]
) -> Evaluation:
    """Compiles an evaluation with the same layers, lowering and placements as the step; dropout is off."""
    dims = jax.tree.map(lambda p: p.spec.dims, placement.sharded)

    def local(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        with lowering(how):
            if not how.manual:
                return objective.loss(objective.cast(params), batch, None)
            entered = data.enter(params, dims)
            if objective.pipeline:
                sums = objective.pipeline.evaluation(entered, batch)
            else:
                sums = objective.loss(entered, batch, None)
            axes = how.axes("batch") + how.axes("stage")
            return lax.psum(sums, axes) if axes else sums

    if how.manual:
        pspecs = jax.tree.map(lambda p: p.pspec, placement.params)
        local = jax.shard_map(
            local, mesh=how.mesh, in_specs=(pspecs, batch_pspecs(how, batch)), out_specs=PartitionSpec(), check_vma=True
        )

    def evaluate(params: Any, batch: Batch) -> dict[str, jax.Array]:
        loss_sum, tokens = local(params, with_rows(batch))
        return {"loss_sum": loss_sum, "tokens": tokens}

    whole = NamedSharding(how.mesh, PartitionSpec())  # pyright: ignore
    return jax.jit(evaluate, out_shardings=whole).lower(structs(placement.params), batch).compile()
