"""What axes of a mesh may divide: layers, experts and tokens, as a model states them or its trace has them."""

from __future__ import annotations

from functools import lru_cache

import jax

from meshpar.errors import MeshparError
from meshpar.experiment.config import Run
from meshpar.experiment.prepare import prepare
from meshpar.experiment.validate import task_of
from meshpar.models.contract import LayerStack
from meshpar.planning.space import Layout

SIZES = (2, 3, 5)
"""Of an axis that is tried: a model may have heads for only one of them."""


def layers_of(run: Run, platform: str) -> LayerStack | None:
    """The layers of a run's model; None if nothing cuts it."""
    return run.model.layer_stack() or _cut(run.model_dump_json(), platform)


def has_experts(run: Run) -> bool:
    """Whether parameters of a run's model have the dim `experts`, which the axis `expert` shards."""
    return _names_experts(run.model_dump_json())


def shares_tokens(run: Run, platform: str) -> bool:
    """Whether devices along `tensor` may share the tokens of a row between products, as `megatron_sp` does."""
    return any(_shares_tokens(run.model_dump_json(), platform, size) for size in SIZES)


@lru_cache(maxsize=4)
def _shares_tokens(run: str, platform: str, size: int) -> bool:
    """A model may have no dim for a sequence, as one of pictures, or one that is not divisible."""
    try:
        shared = Layout((("tensor", size),)).applied(Run.model_validate_json(run))
        prepare(shared, shared.mesh.abstract(platform=platform))
    except MeshparError:
        return False
    return True


@lru_cache(maxsize=4)
def _names_experts(run: str) -> bool:
    made = Run.model_validate_json(run)
    try:
        specs = made.model.program(task_of(made)).specs
    except MeshparError:  # which `prepare` reports
        return False
    return any("experts" in spec.dims for spec in jax.tree.leaves(specs))


@lru_cache(maxsize=4)  # the space and the probes ask
def _cut(run: str, platform: str) -> LayerStack | None:
    """The layers at which the trace of a loss is cut."""
    try:
        staged = Layout((("pipe", 2),), schedule="1f1b", num_microbatches=2).applied(Run.model_validate_json(run))
        pipeline = prepare(staged, staged.mesh.abstract(platform=platform)).pipeline
    except MeshparError:
        return None
    stacks = pipeline.parts.layer_counts().stacks if pipeline else ()
    return LayerStack(tuple(stack.num_layers for stack in stacks), 1) if stacks else None
