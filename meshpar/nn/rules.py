"""Checks that a decoder computes what rules shard: it does all that the partitioner plans, but for experts."""

from __future__ import annotations

from collections.abc import Iterable

from meshpar.errors import Problems
from meshpar.parallel.context import ParallelContext
from meshpar.sharding.resolve import live
from meshpar.sharding.rules import ACTIVATION_DIMS, TOKENS

GSPMD = {"stage": "GSPMD has no pipeline: all stages would do the same work"}
OF_EXPERTS = {
    "experts": "its devices would hold the same tokens; experts belong on an axis of the batch",
    "router": "a router compares the scores of all experts",
    "embed": "experts and their router need whole rows of the residual stream",
}
"""Dims that no axis may divide beside those of the batch, which store shards of them."""


def check_rules(has_experts: bool, ctx: ParallelContext, problems: Problems) -> None:
    """Reports every rule that shards a dim in a way that is not computed."""
    for i, dim in enumerate(ACTIVATION_DIMS):
        # Along an axis, devices hold different rows or different parts of rows, but not both.
        for tokens in TOKENS[:i]:
            shared = tuple(axis for axis in ctx.rules[dim] if axis in ctx.rules[tokens])
            if taken := live(ctx.mesh, shared):
                why = f"{tokens} is sharded over it already, and no parameter has such a dim"
                _refuse(dim, taken, why, ctx, problems)
    limits = GSPMD if not ctx.manual else OF_EXPERTS if has_experts else {}
    for dim, why in limits.items():
        if dim in ctx.rules.table and (partition := ctx.axes(dim)):
            _refuse(dim, partition, why, ctx, problems)


def _refuse(dim: str, axes: tuple[str, ...], why: str, ctx: ParallelContext, problems: Problems) -> None:
    others = [axis for axis in ctx.rules[dim] if axis not in axes]
    what = f"cannot be sharded over {', '.join(axes)}: {why}"
    problems.add(f"rules.{dim}", what, f"rules.{dim}={_text(others)}")


def _text(axes: Iterable[str]) -> str:
    return f"[{', '.join(axes)}]"
