"""Describes how a pipeline cuts the loss of a user's model into stages."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jax.extend.core import ClosedJaxpr

from meshpar.cost.flops import needed_flops, traced_products
from meshpar.errors import ProgramError
from meshpar.parallel.context import ParallelContext
from meshpar.parallel.pipeline.execute import Pipeline
from meshpar.partition.stages import StagedLoss
from meshpar.tree import human_bytes, human_flops


def product_flops(program: ClosedJaxpr) -> float:
    """The FLOPs of a part of a loss; 0 if it multiplies in a `while` of unknown length."""
    try:
        return float(needed_flops(traced_products(program)))
    except ProgramError:
        return 0.0


def describe_cut(staged: StagedLoss, pipeline: Pipeline, ctx: ParallelContext) -> str:
    """The stages of a cut: their layers, parameters and forward FLOPs for a microbatch, and the bytes of a message."""
    cut = staged.cut
    values = [v.aval for v in cut.layer.jaxpr.outvars]
    num_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in values)
    shapes = ", ".join(x.str_short(short_dtypes=True) for x in values)
    message = f"a message of a microbatch is {human_bytes(num_bytes)} on all devices of a stage: {shapes}"
    kind = "stacked in dim layers" if cut.is_stacked else "a list, of which every stage stores all"
    return "\n    ".join([f"{cut.num_layers} equal layers, {kind}", *_stages(staged, pipeline, ctx), message])


def _stages(staged: StagedLoss, pipeline: Pipeline, ctx: ParallelContext) -> Iterator[str]:
    cut, chunks = staged.cut, pipeline.cut(ctx).layers
    first, layer, last = (product_flops(part) for part in (cut.first, cut.layer, cut.last))
    num_stages = len(chunks)
    end = pipeline.schedule.stage_of(num_stages * pipeline.schedule.chunks_per_stage - 1, num_stages)
    for stage, own in enumerate(chunks):
        parts = [_range(int(row[row >= 0].min()), int(row.max())) for row in own]
        count = int((own >= 0).sum())
        flops = count * layer + first * (stage == 0) + last * (stage == end)
        params = count * staged.params_of_a_layer
        held = f"layers {', '.join(parts)}, with {params:,} parameters"
        held = f"what stands before; {held}" if stage == 0 else held
        held = f"{held}; what stands after" if stage == end else held
        yield f"stage {stage}: {held}; {human_flops(flops)} in a forward of a microbatch"


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"
