"""Describes how a pipeline cuts the loss of a user's model into stages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr

from meshpar.cost.flops import needed_flops, traced_products
from meshpar.errors import ProgramError
from meshpar.parallel.context import ParallelContext
from meshpar.parallel.pipeline.execute import Pipeline
from meshpar.partition.cut import Cut
from meshpar.partition.stages import StagedLoss
from meshpar.tree import human_bytes, human_flops


def product_flops(program: ClosedJaxpr) -> float:
    """The FLOPs of a part of a loss; 0 if it multiplies in a `while` of unknown length."""
    try:
        return float(needed_flops(traced_products(program)))
    except ProgramError:
        return 0.0


def describe_cut(pipeline: Pipeline, ctx: ParallelContext) -> str:
    """The stages of a cut: their layers, parameters and forward FLOPs for a microbatch, and the bytes of a message."""
    staged: Any = pipeline.parts
    values = message_of(staged.cut)
    num_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in values)
    shapes = ", ".join(x.str_short(short_dtypes=True) for x in values)
    message = f"a message of a microbatch is {human_bytes(num_bytes)} on all devices of a stage: {shapes}"
    kinds = [
        f"{one.num_layers} equal layers, {'stacked in dim layers' if one.is_stacked else _LIST}"
        for one in staged.cut.stacks
    ]
    return "\n    ".join(["; then ".join(kinds), *_stages(staged, pipeline, ctx), message])


_LIST = "a list, of which every stage stores all"


def message_of(cut: Cut) -> list[Any]:
    """The arrays that layers of all stacks pass on, with whole shapes, of a microbatch."""
    values: list[Any] = []
    for one in cut.stacks:
        values += [x for i, x in enumerate(one.message) if one.message[: i + 1].count(x) > values.count(x)]
    return values


def _stages(staged: StagedLoss, pipeline: Pipeline, ctx: ParallelContext) -> Iterator[str]:
    stacks, chunks = staged.cut.stacks, pipeline.cut(ctx).layers
    sizes = [one.num_layers for one in stacks]
    numbers = np.repeat(range(len(stacks)), sizes)  # the stack of each layer
    firsts = np.cumsum([0, *sizes[:-1]]).tolist()  # the first layer of each stack
    last = product_flops(staged.cut.end)
    entries = [product_flops(one.first) for one in stacks]
    layers = [product_flops(one.layer) for one in stacks]
    num_stages = len(chunks)
    end = pipeline.schedule.stage_of(num_stages * pipeline.schedule.chunks_per_stage - 1, num_stages)
    for stage, own in enumerate(chunks):
        parts = [_range(int(row[row >= 0].min()), int(row.max())) for row in own]
        held = own[own >= 0].tolist()
        begun = [number for number, first in enumerate(firsts) if first in held]
        flops = sum(layers[numbers[i]] for i in held) + sum(entries[i] for i in begun) + last * (stage == end)
        params = sum(staged.params_of_a_layer[numbers[i]] for i in held)
        what = f"layer{'s' * (len(held) > 1)} {', '.join(parts)}, with {params:,} parameters"
        between = [f"what stands before layer {firsts[i]}" for i in begun if i]
        what = "; ".join([*(["what stands before"] if 0 in begun else []), what, *between])
        what = f"{what}; what stands after" if stage == end else what
        yield f"stage {stage}: {what}; {human_flops(flops)} in a forward of a microbatch"


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"
