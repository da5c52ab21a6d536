"""What the rules of a run plan: where parameters are gathered and reduced, and which arrays are whole on purpose."""

from __future__ import annotations

from typing import Any

from meshpar.inspection.findings.finding import Axes, Planned
from meshpar.parallel.context import ParallelContext
from meshpar.sharding.resolve import Placement
from meshpar.tree import flatten_with_paths


def planned_by(ctx: ParallelContext, params: Any, opt_state: Any) -> Planned:
    """The plan of a step `step(state, batch)`.

    Args:
      params: tree of `Placement`, as sharded as the rules can make them.
      opt_state: tree of `Placement`.
    """
    state = {f"state.params.{path}": one for path, one in flatten_with_paths(params).items()}
    stored = {path: _stored(one, ctx) for path, one in state.items()}
    state |= {f"state.opt_state.{path}": one for path, one in flatten_with_paths(opt_state).items()}
    return Planned(
        gathered=stored,
        # ZeRO-3 never holds a whole gradient, and so reduces in each layer of each microbatch.
        reduced_in_loop=stored if ctx.manual and ctx.rules.zero_stage == 3 else {},
        whole=("batch.**", *(path for path, one in state.items() if _is_whole_on_purpose(one, ctx))),
        dims={path: one.spec.dims for path, one in state.items()},
    )


def _stored(one: Placement, ctx: ParallelContext) -> Axes:
    return tuple(axis for dim in one.spec.dims for axis in ctx.storage(dim))


def _is_whole_on_purpose(one: Placement, ctx: ParallelContext) -> bool:
    """Whether the user wrote down that it is replicated: by a preset that says so, or a rule for a dim of it."""
    of_stage_1 = ctx.rules.zero_stage == 1 and any(one.axes)
    return "replicated" in ctx.rules.preset or of_stage_1 or not ctx.rules.explicit.keys().isdisjoint(one.spec.dims)
