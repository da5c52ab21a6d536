"""The plan of a step: the gathers, reductions and whole arrays that its author intends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshpar.mesh.varying import Axes
from meshpar.parallel.context import ParallelContext
from meshpar.tree import flatten_with_paths, matching


@dataclass(frozen=True)
class Planned:
    """The intended gathers, reductions and whole arrays, which are no findings.

    Arguments are named by dotted paths, such as `state.params.head`.

    Args:
      gathered: path -> the axes over which the parameter is stored, and gathered before use.
      reduced_in_loop: path -> the axes over which its gradient is reduced in each iteration of an accumulation.
      whole: globs of the arguments that every device holds whole.
      dims: path -> names of the dims, for arrays that are placed by rules.

    Examples:
      >>> Planned(gathered={"params.w": ("fsdp",)}, whole=("batch.**",)).is_whole("batch.tokens")
      True
    """

    gathered: Mapping[str, Axes] = field(default_factory=dict)
    reduced_in_loop: Mapping[str, Axes] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    dims: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def is_whole(self, path: str) -> bool:
        return any(matching([path], glob) for glob in self.whole)


def planned_by(ctx: ParallelContext, params: Any, opt_state: Any, slices: Mapping[str, Any] | None = None) -> Planned:
    """The plan of a run's step `step(state, batch)`, from its rules.

    Args:
      params: tree of `Placement`, as sharded as the rules can make them.
      opt_state: tree of `Placement`.
      slices: trees of `Placement` of slices that train alone, by their names in `state.carried.slices`.
    """
    own = {name: flatten_with_paths(tree) for name, tree in (slices or {}).items()}
    rules = ctx.rules
    state = {f"state.params.{path}": one for path, one in flatten_with_paths(params).items()}
    state |= {f"state.carried.slices.params.{path}": one for path, one in own.get("params", {}).items()}
    stored = {path: _storage(ctx, one.spec.dims) for path, one in state.items()}
    state |= {f"state.opt_state.{path}": one for path, one in flatten_with_paths(opt_state).items()}
    state |= {f"state.carried.slices.opt_state.{path}": one for path, one in own.get("opt_state", {}).items()}
    whole = ["batch.**"]
    for path, one in state.items():
        has_rule = not rules.explicit.keys().isdisjoint(one.spec.dims)
        if "replicated" in rules.preset or has_rule or (rules.zero_stage == 1 and any(one.axes)):
            whole.append(path)
    return Planned(
        gathered=stored,
        reduced_in_loop=stored if ctx.reduces_in_loop else {},
        whole=tuple(whole),
        dims={path: one.spec.dims for path, one in state.items()},
    )


def _storage(ctx: ParallelContext, dims: tuple[str, ...]) -> Axes:
    """The axes over which an array is stored. The dim of slices has no rule: each device holds its own slice."""
    return tuple(axis for dim in dims if dim in ctx.rules.table for axis in ctx.storage(dim))
