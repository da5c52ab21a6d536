"""What a program does that its author hardly meant, with the place, the cost and a way out; silence where all is well.

Each finding rests on what the compiled program does, and names no tensor that the data flow does not lead to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from jax.stages import Compiled

from meshpar.inspection.findings.accumulation import Accumulations
from meshpar.inspection.findings.donation import find_copied
from meshpar.inspection.findings.finding import Axes, Finding, Planned
from meshpar.inspection.findings.remat import find_rematerializations
from meshpar.inspection.findings.replication import find_replicated
from meshpar.inspection.program.arguments import Passed, arguments, outputs
from meshpar.inspection.program.flow import Flow
from meshpar.inspection.program.hlo import Collective
from meshpar.inspection.program.text import Instruction, Program
from meshpar.inspection.program.walk import Visit
from meshpar.sharding.resolve import AnyMesh

THRESHOLD_BYTES = 2**20
_AFTER_LOOP = (
    "reduce after the loop, as lowering=manual does; elsewhere, in jax.shard_map, cast the parameters before the loop "
    "with jax.lax.pcast(w, axes, to='varying') and psum the sums after it"
)


@dataclass(frozen=True)
class Reading:
    """A program as it was read: all that findings are made of.

    Args:
      compiled: None if there is only the text; then nothing is found of arguments and outputs.
      warnings: of the partitioner, see `compiling`.
    """

    program: Program
    visits: list[Visit]
    flow: Flow
    collectives: tuple[Collective, ...]
    compiled: Compiled | None
    mesh: AnyMesh | None
    warnings: Iterable[str] = ()

    @cached_property
    def lines(self) -> dict[int, Instruction]:
        return {visit.instruction.line: visit.instruction for visit in self.visits}


def find(read: Reading, planned: Planned | None, threshold_bytes: int) -> tuple[Finding, ...]:
    """All findings, the most expensive first.

    Args:
      planned: what is no finding; without it, gathers are judged by what they gather alone.
      threshold_bytes: of the smallest array that is worth a word where nothing is planned.
    """
    given = arguments(read.compiled, read.flow) if read.compiled else []
    made = _new(read.program, outputs(read.compiled)) if read.compiled else []
    found = [
        *find_rematerializations(read.program, read.collectives, read.warnings, read.mesh),
        *find_replicated([*given, *made], planned or Planned(), threshold_bytes),
        *find_copied(read.program, read.flow, given),
        *_reduced_in_loop(read, planned or Planned()),
        *(
            _gathered_whole(read, given, threshold_bytes)
            if planned is None
            else _gathered_unplanned(read, planned, given)
        ),
    ]
    return tuple(sorted(_merged(found), key=lambda one: one.num_bytes, reverse=True))


def _new(program: Program, made: list[Passed]) -> list[Passed]:
    """The outputs that are not written over an argument."""
    return [one for one in made if one.number not in program.aliases]


def _merged(found: Iterable[Finding]) -> list[Finding]:
    """Those that say the same of the same line as one, as of the forward pass and the backward."""
    costs: dict[Finding, int] = {}
    for one in found:
        same = replace(one, num_bytes=0)
        costs[same] = costs.get(same, 0) + one.num_bytes
    return [replace(one, num_bytes=cost) for one, cost in costs.items()]


# Gathers ---------------------------------------------------------------------------------------------------------


def _gathered_unplanned(read: Reading, planned: Planned, given: Iterable[Passed]) -> Iterator[Finding]:
    """Parameters that are gathered over axes over which they were to stay sharded."""
    sharded = {one.path: one.axes for one in given}
    for one in read.collectives:
        astray = _astray(one, planned.gathered)
        # A parameter that lies whole is not gathered: what is written over it may well be.
        kept = {path: tuple(axis for axis in axes if axis in sharded.get(path, axes)) for path, axes in astray.items()}
        astray = {path: axes for path, axes in kept.items() if axes}
        if one.kind == "all_gather" and astray:
            becomes = "" if _gathers(read, one) else "what becomes "
            axes = ", ".join(dict.fromkeys(axis for axes in astray.values() for axis in axes))
            what = f"{becomes}{_names(list(astray))} is gathered over {axes}, over which it was to stay sharded"
            fix = "pin the arrays that meet it there to their shardings, with meshpar.constrain(x, ...)"
            yield Finding("unplanned_gather", what, one.place, _sent(one), fix)


def _gathered_whole(read: Reading, given: Iterable[Passed], threshold_bytes: int) -> Iterator[Finding]:
    """Parameters that are sharded, of which a device nevertheless makes the whole at once."""
    sharded = {one.path: one for one in given if one.axes}
    for one in read.collectives:
        sizes = {array.size for array in one.arrays if array.num_bytes >= threshold_bytes}
        for path in _gathers(read, one):
            if one.kind == "all_gather" and path in sharded and sharded[path].size in sizes:
                axes = sharded[path].axes
                what = f"{path} is sharded over {', '.join(axes)}, but gathered whole"
                fix = (
                    "use it as it lies, or gather it layer by layer inside a scan; if it is meant, say so: "
                    f"planned=Planned(gathered={{{path!r}: {axes!r}}})"
                )
                yield Finding("unplanned_gather", what, one.place, _sent(one), fix)


def _gathers(read: Reading, one: Collective) -> tuple[str, ...]:
    """The parameters of which it gathers, without those over which is written what it makes."""
    return read.flow.gathers(read.lines[one.line])


# Reductions in a loop --------------------------------------------------------------------------------------------


def _reduced_in_loop(read: Reading, planned: Planned) -> Iterator[Finding]:
    """Gradients that are reduced once in each turn of the loop that adds them up."""
    kinds = ("all_reduce", "reduce_scatter")
    found = [one for one in read.collectives if one.kind in kinds and one.times > 1]
    reductions = [one for one in found if any(array.size > 1 for array in one.arrays)]  # a loss costs nothing
    turns = Accumulations(read.flow).turns if reductions else {}
    anywhere = {axis for axes in planned.reduced_in_loop.values() for axis in axes}
    for one in reductions:
        meant = not one.tensors and one.axes is not None and anywhere.issuperset(one.axes) and bool(anywhere)
        if one.line not in turns or meant or (one.tensors and not _astray(one, planned.reduced_in_loop)):
            continue
        num = turns[one.line]
        names = list(_astray(one, planned.reduced_in_loop)) or list(map(str, one.arrays))
        over = f" over {', '.join(one.axes)}" if one.axes else ""
        what = f"{'the gradient of ' if one.tensors else ''}{_names(names)} is reduced{over} {num} times"
        yield Finding(
            kind="reduction_in_loop",
            what=f"{what}, once in each turn of the loop that adds it up",
            where=one.place,
            num_bytes=_sent(one) * (num - 1) // num,
            fix=_AFTER_LOOP,
        )


def _astray(one: Collective, planned: Mapping[str, Axes]) -> dict[str, Axes]:
    """Its tensors, each with the axes over which nothing was planned for it; those that have none are left out."""
    if one.axes is None:
        return {}
    rest = {path: tuple(axis for axis in one.axes if axis not in planned.get(path, ())) for path in one.tensors}
    return {path: axes for path, axes in rest.items() if axes}


def _sent(one: Collective) -> int:
    return round(one.times * one.sent_bytes)


def _names(paths: list[str]) -> str:
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
