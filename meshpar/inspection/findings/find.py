"""Finds operations of a compiled program that its author probably did not intend; reports place, cost and a fix.

Each finding is derived from the compiled program, and names only tensors that the data flow leads to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from jax.stages import Compiled

from meshpar.inspection.findings.accumulation import Accumulations
from meshpar.inspection.findings.donation import find_copied
from meshpar.inspection.findings.finding import Finding
from meshpar.inspection.findings.planned import Planned
from meshpar.inspection.findings.remat import find_rematerializations
from meshpar.inspection.findings.replication import find_replicated
from meshpar.inspection.program.arguments import Passed, arguments, outputs
from meshpar.inspection.program.flow import Flow
from meshpar.inspection.program.hlo import Collective
from meshpar.mesh.varying import Axes
from meshpar.sharding.resolve import AnyMesh

THRESHOLD_BYTES = 2**20
_AFTER_LOOP = (
    "reduce after the loop, as lowering=manual does; elsewhere, in jax.shard_map, cast the parameters before the loop "
    "with jax.lax.pcast(w, axes, to='varying') and psum the sums after it"
)


@dataclass(frozen=True)
class Reading:
    """A compiled program, parsed and walked.

    Args:
      compiled: None if only the text is available; then arguments and outputs have no findings.
      warnings: the partitioner's warnings, see `compiling`.
    """

    flow: Flow
    collectives: tuple[Collective, ...]
    compiled: Compiled | None
    mesh: AnyMesh | None
    warnings: Iterable[str] = ()


def find(read: Reading, planned: Planned | None, threshold_bytes: int) -> tuple[Finding, ...]:
    """All findings, the most expensive first.

    Args:
      planned: the gathers, reductions and whole arrays that are intended. Without it, a gather of a whole sharded
        parameter is a finding.
      threshold_bytes: the least size of an array whose replication, or whose gather without `planned`, is a finding.
    """
    taken: list[Passed] = []
    returned: list[Passed] = []
    if read.compiled:
        taken = arguments(read.compiled, read.flow)
        returned = [one for one in outputs(read.compiled) if one.number not in read.flow.program.aliases]
    found = [
        *find_rematerializations(read.flow.program, read.collectives, read.warnings, read.mesh),
        *find_replicated([*taken, *returned], planned or Planned(), threshold_bytes),
        *find_copied(read.flow, taken),
        *_reduced_in_loop(read, planned or Planned()),
    ]
    if planned is None:
        found += _gathered_whole(read, taken, threshold_bytes)
    else:
        found += _gathered_unplanned(read, planned, taken)
    # One line can have equal findings, as in the forward pass and the backward.
    costs: Counter[Finding] = Counter()
    for one in found:
        costs[replace(one, num_bytes=0)] += one.num_bytes
    merged = [replace(one, num_bytes=cost) for one, cost in costs.items()]
    return tuple(sorted(merged, key=lambda one: one.num_bytes, reverse=True))


# Gathers ---------------------------------------------------------------------------------------------------------


def _gathered_unplanned(read: Reading, planned: Planned, taken: Iterable[Passed]) -> Iterator[Finding]:
    """Gathers of parameters over axes over which the plan keeps them sharded."""
    sharded = {one.path: one.axes for one in taken}
    for one in read.collectives:
        astray: dict[str, Axes] = {}
        for path, axes in _astray(one, planned.gathered).items():
            # A parameter that is not sharded cannot be gathered, but its new value can.
            if over := tuple(axis for axis in axes if axis in sharded.get(path, axes)):
                astray[path] = over
        if one.kind == "all_gather" and astray:
            value = "" if read.flow.gathers(one.instruction) else "the new value of "
            axes = ", ".join(dict.fromkeys(axis for axes in astray.values() for axis in axes))
            what = f"{value}{_names(list(astray))} is gathered over {axes}, but the plan keeps it sharded there"
            fix = "constrain the shardings of the arrays that it is combined with: meshpar.constrain(x, ...)"
            yield Finding("unplanned_gather", what, one.place, _sent(one), fix)


def _gathered_whole(read: Reading, taken: Iterable[Passed], threshold_bytes: int) -> Iterator[Finding]:
    """Gathers of whole sharded parameters."""
    sharded = {one.path: one for one in taken if one.axes}
    for one in read.collectives:
        sizes = {array.size for array in one.arrays if array.num_bytes >= threshold_bytes}
        for path in read.flow.gathers(one.instruction):
            if one.kind == "all_gather" and path in sharded and sharded[path].size in sizes:
                axes = sharded[path].axes
                what = f"{path} is sharded over {', '.join(axes)}, but gathered whole"
                fix = (
                    "compute with its shards, or gather it layer by layer inside a scan; if it is intended, pass "
                    f"planned=Planned(gathered={{{path!r}: {axes!r}}})"
                )
                yield Finding("unplanned_gather", what, one.place, _sent(one), fix)


# Reductions in a loop --------------------------------------------------------------------------------------------


def _reduced_in_loop(read: Reading, planned: Planned) -> Iterator[Finding]:
    """Gradients that are reduced in each iteration of the loop that adds them up."""
    kinds = ("all_reduce", "reduce_scatter")
    found = [one for one in read.collectives if one.kind in kinds and one.times > 1]
    reductions = [one for one in found if any(array.size > 1 for array in one.arrays)]  # a loss costs nothing
    turns = Accumulations(read.flow).turns if reductions else {}
    planned_axes = {axis for axes in planned.reduced_in_loop.values() for axis in axes}
    for one in reductions:
        astray = list(_astray(one, planned.reduced_in_loop))
        if one.tensors:
            is_planned = not astray
        else:
            is_planned = one.axes is not None and bool(planned_axes) and planned_axes.issuperset(one.axes)
        if one.line not in turns or is_planned:
            continue
        num = turns[one.line]
        over = f" over {', '.join(one.axes)}" if one.axes else ""
        reduced = f"{'the gradient of ' if one.tensors else ''}{_names(astray or list(map(str, one.arrays)))}"
        yield Finding(
            kind="reduction_in_loop",
            what=f"{reduced} is reduced{over} {num} times, once in each iteration of the loop that adds it up",
            where=one.place,
            num_bytes=_sent(one) * (num - 1) // num,
            fix=_AFTER_LOOP,
        )


def _astray(one: Collective, planned: Mapping[str, Axes]) -> dict[str, Axes]:
    """The tensors of a collective -> the axes over which the plan does not contain it; only tensors with such axes."""
    if one.axes is None:
        return {}
    rest = {path: tuple(axis for axis in one.axes if axis not in planned.get(path, ())) for path in one.tensors}
    return {path: axes for path, axes in rest.items() if axes}


def _sent(one: Collective) -> int:
    return round(one.total_bytes)


def _names(paths: list[str]) -> str:
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
