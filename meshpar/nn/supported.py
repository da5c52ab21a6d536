"""How the layers of this package can have each of their dims sharded: what rules may ask of them.

A rule can name any axis for any dim. Layers are written for some of that: their code gathers what is stored in shards,
and reduces what was computed from a part. Each dim that they cannot have sharded in every way stands in a table here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshpar.errors import Problems
from meshpar.parallel.context import ParallelContext
from meshpar.sharding.rules import ACTIVATION_DIMS


@dataclass(frozen=True)
class Supported:
    """How layers can have a dim sharded.

    Args:
      storage: over an axis that carries the batch: a device stores a shard, and gathers the whole before use.
      partition: over any other axis: a device computes with its shard.
      same_as: a dim that a partition must share its axes with.
      within: a dim whose axes must include those of a partition.
      why: what speaks against everything else.
    """

    storage: bool = True
    partition: bool = True
    same_as: str | None = None
    within: str | None = None
    why: str = ""


_NOTHING_STORED = "the batch is sharded over it already, and no parameter has such a dim"
MANUAL: Mapping[str, Supported] = {
    "seq": Supported(storage=False, partition=False, why="attention needs the whole sequence on each device"),
    "norm_seq": Supported(storage=False, within="vocab"),
    "stage": Supported(storage=False),
    "layers": Supported(storage=False, same_as="stage", why="a device needs all layers of its stage"),
    "embed": Supported(partition=False, why="norms and projections need whole rows of the residual stream"),
    "positions": Supported(partition=False, why="a device looks up any position"),
    "kv_heads": Supported(same_as="heads"),
    "head_dim": Supported(partition=False, why="attention needs whole heads"),
    "rank": Supported(partition=False, why="LoRA needs all columns of its thin matrices"),
}
"""Under `lowering: manual`. A dim that is not here can be sharded over any axis."""
AUTO: Mapping[str, Supported] = {
    "seq": Supported(storage=False),
    "norm_seq": Supported(storage=False),
    "stage": Supported(
        storage=False, partition=False, why="GSPMD knows no pipeline: all stages would do the same work"
    ),
}
"""Under `lowering: auto`, where XLA communicates whatever a rule needs."""


def check_supported(ctx: ParallelContext, problems: Problems) -> None:
    """Adds every rule that shards a dim in a way that the layers are not written for."""
    for dim, supported in (MANUAL if ctx.manual else AUTO).items():
        if dim in ctx.rules.table:
            _check(dim, supported, ctx, problems)


def _check(dim: str, supported: Supported, ctx: ParallelContext, problems: Problems) -> None:
    stored, partition = ctx.storage(dim), ctx.axes(dim)
    if stored and not supported.storage:
        _refuse(dim, stored, _NOTHING_STORED if dim in ACTIVATION_DIMS else supported.why, ctx, problems)
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
