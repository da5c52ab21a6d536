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

Evaluation = Callable[[Any, Batch, Any], dict[str, jax.Array]]
"""(params, batch, carried) -> `loss` f32[], `tokens` int32[] and the loss's own metrics, sums over all devices.

Nothing is donated."""


def compile_evaluation(
    objective: Objective, how: Lowering, placement: StatePlacement, batch: dict[str, jax.ShapeDtypeStruct]
) -> Evaluation:
    """Compiles an evaluation with the same layers, lowering and placements as the step; dropout is off."""
    dims = jax.tree.map(lambda p: p.spec.dims, placement.sharded)

    def local(params: Any, batch: Batch, carried: Any) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        with lowering(how):
            if not how.manual:
                return objective.loss(objective.cast(params), batch, None, carried).sums
            sums = objective.loss(data.enter(params, dims), batch, None, carried).sums
            return lax.psum(sums, how.axes("batch")) if how.axes("batch") else sums

    if how.manual:
        params, carried = (jax.tree.map(lambda p: p.pspec, tree) for tree in (placement.params, placement.carried))
        specs = (params, batch_pspecs(how, batch), carried)
        local = jax.shard_map(local, mesh=how.mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=True)

    def evaluate(params: Any, batch: Batch, carried: Any) -> dict[str, jax.Array]:
        loss, tokens, metrics = local(params, with_rows(batch), carried)
        return metrics | {"loss": loss, "tokens": tokens}

    whole = NamedSharding(how.mesh, PartitionSpec())  # pyright: ignore
    arguments = structs(placement.params), batch, structs(placement.carried)
    return jax.jit(evaluate, out_shardings=whole).lower(*arguments).compile()
