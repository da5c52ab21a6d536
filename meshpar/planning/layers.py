"""The layers that a pipeline may divide: those that a model states, or those at which the trace of a loss is cut."""

from __future__ import annotations

from functools import lru_cache

from meshpar.errors import MeshparError
from meshpar.experiment.config import Run
from meshpar.experiment.prepare import prepare
from meshpar.models.contract import LayerStack
from meshpar.planning.space import Layout


def layers_of(run: Run, platform: str) -> LayerStack | None:
    """The layers of a run's model; None if nothing cuts it."""
    if run.model.has_own_layers:
        return run.model.layer_stack() or None
    return _cut(run.model_dump_json(), platform)


@lru_cache(maxsize=4)  # the space and the probes ask
def _cut(run: str, platform: str) -> LayerStack | None:
    """The layers at which the trace of a user's loss is cut."""
    try:
        staged = Layout((("pipe", 2),), schedule="1f1b", num_microbatches=2).applied(Run.model_validate_json(run))
        pipeline = prepare(staged, staged.mesh.abstract(platform=platform)).pipeline
    except MeshparError:
        return None
    stacks = pipeline.parts.layer_counts().stacks if pipeline else ()
    return LayerStack(sum(stack.num_layers for stack in stacks), 1) if stacks else None
