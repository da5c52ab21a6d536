"""Evaluates the loss of a batch without gradients, with a separate program of the step's forward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from meshpar.errors import ConfigError, Problems
from meshpar.optim.ema import averaged
from meshpar.parallel import data
from meshpar.parallel.context import ParallelContext
from meshpar.sharding.spec import ArraySpec
from meshpar.train.gradients import Objective
from meshpar.train.loss import Batch, LossSums
from meshpar.train.program import (
    WHOLE,
    Program,
    batch_pspecs,
    batch_structs,
    compile_program,
    on_shards,
    pspecs,
    structs,
    trace,
    whole,
    with_rows,
)  # fmt: skip
from meshpar.train.state import StatePlacement, TrainState, on_device
from meshpar.train.strategy import of_loss
from meshpar.tree import path_name

Evaluation = Callable[[Any, Batch, Any], dict[str, jax.Array]]
"""(params, batch, carried) -> `loss` f32[], `tokens` int32[] and the loss's own metrics, summed over all devices.

Nothing is donated."""


@dataclass(frozen=True)
class LazyEvaluation:
    """An `Evaluation` that is traced and compiled at its first call, so that the first step does not wait for it."""

    trace: Callable[[], jax.stages.Traced]

    @cached_property
    def traced(self) -> jax.stages.Traced:
        """The traced evaluation. Tracing finds the model's errors before anything is compiled."""
        with jax.transfer_guard("allow"):  # a model may compute constants while it is traced
            return self.trace()

    @cached_property
    def _program(self) -> Program:
        return compile_program(self.traced)

    def __call__(self, params: Any, batch: Batch, carried: Any) -> dict[str, jax.Array]:
        return self._program(params, batch, carried)


def reads(evaluation: LazyEvaluation, name: str) -> bool:
    """Whether the numbers of an evaluation depend on an array of the batch."""
    traced = evaluation.traced
    arguments = jax.tree_util.tree_leaves_with_path(traced.args_info)
    jaxpr = traced.jaxpr.jaxpr
    _, used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    paths = [path_name(path) for path, _ in arguments]
    return any(is_used for path, is_used in zip(paths, used, strict=True) if path.endswith(f"1.{name}"))


Callback = Callable[[TrainState, int], Mapping[str, Any]]
"""(state, step) -> name -> a number to record with the evaluation. It runs on every process and may use collectives.

The evaluation uses the parameters `ema.averaged(state)`."""


def called(callbacks: Sequence[Callback], state: TrainState, step: int, taken: Set[str]) -> dict[str, float]:
    """Runs the callbacks and collects their metrics. They may move data between host and devices.

    Raises:
      ConfigError: lists every name in `taken` and every value that is not a number.
    """
    problems = Problems()
    found: dict[str, float] = {}
    for callback in callbacks:
        with jax.transfer_guard("allow"):
            values = {name: jax.device_get(value) for name, value in callback(state, step).items()}
        for name, value in values.items():
            where = f"{getattr(callback, '__name__', callback)} -> {name}"
            if name in found or name in taken or name in ("kind", "step"):
                problems.add(where, "this name is recorded already", "another name")
            elif np.ndim(value) or not isinstance(value, (int, float, np.generic, np.ndarray)):
                problems.add(where, f"{type(value).__name__} is not a number", "a mean, or a name for each number")
            else:
                found[name] = float(value)
    problems.raise_any(ConfigError, f"an evaluation callback returned values that cannot be recorded, at step {step}:")
    return found


def trace_evaluation(
    objective: Objective, ctx: ParallelContext, placement: StatePlacement, batch: dict[str, ArraySpec]
) -> jax.stages.Traced:
    """Traces an `Evaluation` with the same layers, lowering and placements as the step; dropout is off.

    Its parameters are those of `ema.averaged`.
    """
    dims = jax.tree.map(lambda p: p.spec.dims, placement.sharded)

    def local(params: Any, batch: Batch, carried: Any) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        entered = data.gather_params(params, dims)
        copies = objective.gathered(carried, dims)
        carried = of_loss(carried, objective.unseen)
        carried = carried | copies if copies else carried
        if objective.pipeline:
            return data.summed(LossSums(*objective.pipeline.evaluation(entered, batch, carried)).sums)
        return data.summed(objective.loss(entered, batch, None, carried).sums)

    in_specs = (pspecs(placement.params), batch_pspecs(ctx, batch), pspecs(placement.carried))
    sums = on_shards(local, ctx, in_specs, WHOLE)

    def evaluate(params: Any, batch: Batch, carried: Any) -> dict[str, jax.Array]:
        params = on_device(params, averaged(placement))
        loss, tokens, metrics = sums(params, with_rows(batch), carried)
        scalars = {name: x for name, x in metrics.items() if not x.ndim}
        return scalars | {"loss": loss, "tokens": tokens}

    arguments = structs(averaged(placement)), batch_structs(ctx, batch), structs(placement.carried)
    return trace(evaluate, arguments, whole(ctx.mesh))


def trace_row_results(
    of_rows: Callable[..., dict[str, jax.Array]],
    ctx: ParallelContext,
    placement: StatePlacement,
    batch: dict[str, ArraySpec],
    unseen: Collection[str],
) -> jax.stages.Traced:
    """Traces (params, batch, carried) -> the results of all rows, whole on every device. GSPMD partitions it.

    Args:
      unseen: see `Objective`.
    """

    def local(params: Any, batch: Batch, carried: Any) -> dict[str, jax.Array]:
        return of_rows(params, batch, None, of_loss(carried, unseen))

    found = on_shards(local, ctx, None, WHOLE)

    def results(params: Any, batch: Batch, carried: Any) -> dict[str, jax.Array]:
        return found(on_device(params, averaged(placement)), with_rows(batch), carried)

    arguments = structs(averaged(placement)), batch_structs(ctx, batch), structs(placement.carried)
    return trace(results, arguments, whole(ctx.mesh))
