"""Checks that rules shard dims only in ways that the layers support.

A rule can name any axis for any dim, but a layer must contain the communication for it: it gathers parameters that are
stored in shards, and reduces results computed from a shard. Each layer declares the limits of its dims as `sharding`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshpar.errors import Problems
from meshpar.parallel.context import ParallelContext
from meshpar.sharding.resolve import live
from meshpar.sharding.rules import ACTIVATION_DIMS, TOKENS


@dataclass(frozen=True)
class Supported:
    """How a layer supports a dim that is sharded.

    Args:
      storage: whether an axis that carries the batch may shard it: a device stores a shard, and gathers it before use.
      partition: whether any other axis may shard it: a device computes with its shard.
      same_as: a dim that must be partitioned over the same axes.
      within: a dim that must be partitioned over these axes too, and possibly over more.
      why: the reason for the limits.
    """

    storage: bool = True
    partition: bool = True
    same_as: str | None = None
    within: str | None = None
    why: str = ""


Sharding = Mapping[str, Supported]
"""A layer's limits under `lowering: manual`, by dim. A dim that no layer limits can be sharded over any axis."""

GSPMD: Sharding = {
    "stage": Supported(partition=False, why="GSPMD has no pipeline: all stages would do the same work"),
}
"""The limits under `lowering: auto`, where XLA adds the communication that a rule needs."""


def check_supported(layers: Iterable[Sharding], ctx: ParallelContext, problems: Problems) -> None:
    """Reports every rule that shards a dim in a way that is not supported.

    Args:
      layers: the limits of each layer of the model.
    """
    for i, dim in enumerate(ACTIVATION_DIMS):
        # Along an axis, devices hold different rows or different parts of rows, but not both.
        for tokens in TOKENS[:i]:
            shared = tuple(axis for axis in ctx.rules[dim] if axis in ctx.rules[tokens])
            if taken := live(ctx.mesh, shared):
                why = f"{tokens} is sharded over it already, and no parameter has such a dim"
                _refuse(dim, taken, why, ctx, problems)
    limits = [limit for sharding in (layers if ctx.manual else [GSPMD]) for limit in sharding.items()]
    for dim, supported in dict.fromkeys(limits):
        if dim in ctx.rules.table:
            _check(dim, supported, ctx, problems)


def _check(dim: str, supported: Supported, ctx: ParallelContext, problems: Problems) -> None:
    partition = ctx.axes(dim)
    if not supported.storage and (stored := ctx.storage(dim)):
        _refuse(dim, stored, supported.why, ctx, problems)
    if partition and not supported.partition:
        _refuse(dim, partition, supported.why, ctx, problems)
    elif partition and (other := supported.same_as) and partition != ctx.axes(other):
        _add_mismatch(dim, other, f"{other} must be sharded over the same axes", ctx.axes(other), ctx, problems)
    elif partition and (other := supported.within) and not {*partition} <= {*ctx.axes(other)}:
        _add_mismatch(dim, other, f"{other} must be, too", partition, ctx, problems)


def _refuse(dim: str, axes: tuple[str, ...], why: str, ctx: ParallelContext, problems: Problems) -> None:
    supported_axes = [axis for axis in ctx.rules[dim] if axis not in axes]
    what = f"cannot be sharded over {', '.join(axes)}: {why}"
    problems.add(f"rules.{dim}", what, f"rules.{dim}={_text(supported_axes)}")


def _add_mismatch(
    dim: str, other: str, requirement: str, replaced: tuple[str, ...], ctx: ParallelContext, problems: Problems
) -> None:
    """Reports that the rule of `other` does not fit the partition of `dim`.

    Args:
      replaced: axes of `other` that the suggested rule replaces by those of `dim`.
    """
    partition = ctx.axes(dim)
    rule = ctx.rules.table.get(other, ())
    storage = [axis for axis in ctx.rules[dim] if axis not in partition]
    fixed = [*(axis for axis in rule if axis not in replaced), *partition]
    what = f"is sharded over {', '.join(partition)}, so {requirement}: not {_text(rule)}"
    problems.add(f"rules.{dim}", what, f"rules.{dim}={_text(storage)}, or rules.{other}={_text(fixed)}")


def _text(axes: Iterable[str]) -> str:
    return f"[{', '.join(axes)}]"
