"""Checks that a context's strategies have an effect, and fit the way in which a loss is written.

A config and `meshpar.training` run the same checks. They ask only the context: its mesh, rules and lowering.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np

from meshpar.collectives.reduction import Exact
from meshpar.errors import ConfigError, Problems, ScheduleError
from meshpar.mesh.varying import Axes
from meshpar.parallel.context import ParallelContext
from meshpar.parallel.pipeline.schedule import Schedule
from meshpar.parallel.pipeline.simulate import simulate
from meshpar.sharding.resolve import live
from meshpar.sharding.rules import ACTIVATION_DIMS, TOKENS

MATMUL = "precision.matmul"


def check_strategies(ctx: ParallelContext, is_local: bool, problems: Problems) -> None:
    """Adds each strategy that would have no effect under the rules, the mesh and the lowering of a context.

    Args:
      is_local: whether the loss is written for local shards.
    """
    ctx.parallel.check(ctx.rules, ctx.manual, is_local, problems)
    if ctx.parallel.local:
        ctx.parallel.local.check(ctx.rules, ctx.mesh.shape, ctx.manual, problems)
    _check_reduction(ctx, problems)


def check_rules(ctx: ParallelContext, problems: Problems) -> None:
    """Adds every rule of an activation of meshpar's own decoders that is not computed."""
    for i, dim in enumerate(ACTIVATION_DIMS):
        # Along an axis, devices hold different rows or different parts of rows, but not both.
        for tokens in TOKENS[:i]:
            shared = tuple(axis for axis in ctx.rules[dim] if axis in ctx.rules[tokens])
            if taken := live(ctx.mesh, shared):
                why = f"{tokens} is sharded over it already, and no parameter has such a dim"
                _refuse(dim, taken, why, ctx, problems)
    if not ctx.manual and (stages := ctx.axes("stage")):
        _refuse("stage", stages, "GSPMD has no pipeline: all stages would do the same work", ctx, problems)


def _refuse(dim: str, axes: Axes, why: str, ctx: ParallelContext, problems: Problems) -> None:
    others = ", ".join(axis for axis in ctx.rules[dim] if axis not in axes)
    problems.add(f"rules.{dim}", f"cannot be sharded over {', '.join(axes)}: {why}", f"rules.{dim}=[{others}]")


def check_stages(ctx: ParallelContext, is_local: bool, problems: Problems, num_microbatches: int = 8) -> None:
    """Adds what keeps a loss from running in the stages of a pipeline.

    Args:
      is_local: whether the loss is written for local shards.
      num_microbatches: those of the schedule that is proposed, if stages have none.
    """
    num_stages = ctx.shards("stage")
    if ctx.schedule and is_local:
        what = "a loss for local shards is not traced with whole shapes, so it cannot be cut into stages"
        problems.add("parallel.pipeline", what, "model.manual=false, or parallel.pipeline=null")
    elif ctx.schedule:
        _check_schedule(ctx.schedule, num_stages, problems)
    elif ctx.manual and num_stages > 1 and not is_local:
        what = f"the rules cut the model into {num_stages} stages, but no schedule orders their work"
        schedule = f"{{kind: 1f1b, num_microbatches: {num_microbatches}}}"
        problems.add("parallel.pipeline", what, f"parallel.pipeline={schedule}, or no preset pipeline")


def _check_schedule(schedule: Schedule, num_stages: int, problems: Problems) -> None:
    before = len(problems)
    schedule.check(num_stages, problems)
    if len(problems) > before:
        return
    try:
        simulate(schedule, num_stages)
    except ScheduleError as error:
        problems.add("parallel.pipeline", str(error))


def check_pairs(ctx: ParallelContext, problems: Problems) -> None:
    """Adds that an odd number of shards of a row cannot exchange their keys in pairs, as they do in stages."""
    context, num_devices = ctx.parallel.attention, ctx.row_shards
    rings = num_devices // context.exchange(num_devices)
    if ctx.schedule and context.kind in ("ring", "hybrid") and rings > 1 and rings % 2:
        what = f"inside of stages devices exchange keys in pairs, and {rings} shards of a row are an odd number"
        problems.add("parallel.context", what, "parallel.context=all_gather, or ulysses, or an even number")


def check_recognized(ctx: ParallelContext, loss: str, is_local: bool, problems: Problems) -> None:
    """Adds what attention, products and experts of a user's loss, which are found in its trace, cannot do.

    Args:
      loss: what the messages call it.
      is_local: whether it is written for local shards.
    """
    _check_number_format(ctx, loss, is_local, problems)
    if ctx.parallel.expert:
        num_shards = math.prod(ctx.mesh.shape[axis] for axis in ctx.dispatch("experts"))
        ctx.parallel.expert.check("dropless", num_shards, problems)
    if not ctx.schedule or is_local:
        return
    check_pairs(ctx, problems)
    if ctx.parallel.attention.layout == "zigzag":  # it would permute the shards of a row before and after
        what = "stages of a pipeline work at different times, and XLA's permutations need all devices at once"
        problems.add("parallel.context.layout", what, "parallel.context.layout=auto")


def check_partitioned(ctx: ParallelContext, is_local: bool) -> None:
    """Checks the arguments of `training` that say who partitions a loss.

    Args:
      is_local: whether the loss is written for local shards.
    """
    problems = Problems()
    if is_local and not ctx.manual:
        problems.add("manual", "a loss for local shards runs in the manual lowering", "lowering='manual'")
    if ctx.strict and (is_local or not ctx.manual):
        what = "only a loss that meshpar partitions has activations that it moves"
        problems.add("strict", what, "strict=False, or lowering='manual' and manual=False")
    problems.raise_any(ConfigError, "these arguments of training do not fit each other:")


def check_float64(where: str, dtype: Any, problems: Problems) -> None:
    """Adds a dtype that JAX would silently replace by float32."""
    if dtype is None or np.dtype(dtype) != np.float64 or jax.config.jax_enable_x64:  # pyright: ignore
        return
    what = "JAX would compute in float32, because its 64-bit mode is off"
    problems.add(where, what, f"{where}=float32, or JAX_ENABLE_X64=1 in the environment")


def _check_number_format(ctx: ParallelContext, loss: str, is_local: bool, problems: Problems) -> None:
    if ctx.number_format is None:
        return
    check_qwix(problems)
    if is_local or not (ctx.manual or ctx.mesh.size == 1):
        by = "computes its products itself" if is_local else "is partitioned by XLA, which knows of no scales"
        fix = "manual=False" if is_local else "lowering=manual"
        problems.add(MATMUL, f"{loss} {by}", f"{fix}, or {MATMUL}=null")


def check_qwix(problems: Problems) -> None:
    """Adds a problem if the package that multiplies in 8 bits is missing."""
    if not find_spec("qwix"):
        fix = f"pip install 'meshpar[quantized]', or {MATMUL}=null"
        problems.add(MATMUL, "the package qwix is not installed", fix)


def _check_reduction(ctx: ParallelContext, problems: Problems) -> None:
    """Checks the format in which layers scatter gradients, where another strategy has its own way to scatter them."""
    reduction = ctx.gradient_reduction
    if reduction is None or isinstance(reduction.within, Exact) or not ctx.gathers_in_layers:
        return
    if not any(ctx.storage(dim) for dim in ctx.rules.table if dim != "batch"):
        return
    where = "parallel.gradient_reduction.within"
    if ctx.schedule:
        what = "a rounded reduce-scatter consists of permutes, which wait for all devices, also those in other stages"
        problems.add(where, what, f"{where}=exact, rules.zero=2, or parallel.pipeline=null")
    elif ctx.parallel.fsdp.in_chunks:
        what = "parallel.fsdp.overlap scatters gradients while it multiplies, and adds them unrounded"
        problems.add(where, what, f"{where}=exact, or parallel.fsdp.overlap=none")
