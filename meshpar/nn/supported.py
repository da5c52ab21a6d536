"""Checks that rules shard dims only in ways that the layers support.

A rule can name any axis for any dim. A layer supports some of that: its code gathers parameters that are stored in
shards, and reduces results that were computed from a shard. Each layer declares the dims that it limits as `sharding`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshpar.errors import Problems
from meshpar.parallel.context import ParallelContext
from meshpar.sharding.rules import ACTIVATION_DIMS


@dataclass(frozen=True)
class Supported:
    """How a layer can have a dim sharded.

    Args:
      storage: over an axis that carries the batch: a device stores a shard, and gathers the whole before use.
      partition: over any other axis: a device computes with its shard.
      same_as: a dim that must be partitioned over the same axes.
      within: a dim whose axes must include those of this dim's partition.
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
    "stage": Supported(partition=False, why="GSPMD knows no pipeline: all stages would do the same work"),
}
"""The limits under `lowering: auto`, where XLA communicates whatever a rule needs."""


def check_supported(layers: Iterable[Sharding], ctx: ParallelContext, problems: Problems) -> None:
    """Adds every rule that shards a dim in a way that is not supported.

    Args:
      layers: the limits of each layer of the model.
    """
    for dim in ACTIVATION_DIMS:
        if dim != "batch" and dim in ctx.rules.table and (stored := ctx.storage(dim)):
            _refuse(dim, stored, "the batch is sharded over it already, and no parameter has such a dim", ctx, problems)
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
        return
    other = supported.same_as or supported.within
    if not partition or other is None:
        return
    theirs = ctx.axes(other) if other in ctx.rules.table else ()
    fits = partition == theirs if supported.same_as else set(partition) <= set(theirs)
    if not fits:
        _add_mismatch(dim, other, supported, ctx, problems)


def _refuse(dim: str, axes: tuple[str, ...], why: str, ctx: ParallelContext, problems: Problems) -> None:
    left = [axis for axis in ctx.rules[dim] if axis not in axes]
    problems.add(f"rules.{dim}", f"cannot be sharded over {', '.join(axes)}: {why}", f"rules.{dim}={_text(left)}")


def _add_mismatch(dim: str, other: str, supported: Supported, ctx: ParallelContext, problems: Problems) -> None:
    partition = ctx.axes(dim)
    rule = ctx.rules[other] if other in ctx.rules.table else ()
    if supported.same_as:
        kept = [axis for axis in rule if axis not in ctx.axes(other)]
        what = f"is sharded over {', '.join(partition)}, so {other} must be sharded over the same axes"
    else:
        kept = [axis for axis in rule if axis not in partition]
        what = f"is sharded over {', '.join(partition)}, so {other} must be, too"
    whole = [axis for axis in ctx.rules[dim] if axis not in partition]
    fix = f"rules.{dim}={_text(whole)}, or rules.{other}={_text([*kept, *partition])}"
    problems.add(f"rules.{dim}", f"{what}: not {_text(rule)}", fix)


def _text(axes: Iterable[str]) -> str:
    return f"[{', '.join(axes)}]"
