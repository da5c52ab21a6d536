"""The collectives of a compiled program, read from its text: kind, axes, bytes, and how often each runs.

The text is walked from its entry through every called computation, loops multiplied by their trip counts. Beside
that, the raw lines are searched for anything that looks like communication, by other signs than the walk goes by; a
line that looks so and was not counted is an error, so that nothing passes unseen.

What is not seen: communication inside a custom call (a Pallas kernel's remote copies).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from jax.stages import Compiled

from meshpar.errors import Problems, ProgramError
from meshpar.inspection.program.flow import Flow
from meshpar.inspection.program.groups import Groups, differing_axes, find_groups, spanned_axes
from meshpar.inspection.program.text import Array, Instruction, Program, arrays_of, unquoted
from meshpar.inspection.program.walk import Visit, walk
from meshpar.sharding.resolve import AnyMesh

KINDS = {
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "ragged_all_to_all",
    "collective-permute": "collective_permute",
    "collective-broadcast": "collective_broadcast",
}
_ELEMENT = re.compile(r"\([^()]*\)|[a-z]\w*\[[^\]]*\]")
_LAYOUT = re.compile(r"\{[^}]*\}|/\*.*?\*/")
# Deliberately not made from KINDS: it must also see what KINDS does not name.
_COMMUNICATES = re.compile(
    r"\breplica_groups=|\bsource_target_pairs="
    r"|[\])}] (?:all-|collective|ragged|reduce-scatter|send)[\w\-]*(?<!-done)(?<!-update)\("
)


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Args:
      kind: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `collective_permute`, ...
      arrays: that a device gets of it; several where XLA combined collectives, or splits its buffer.
      full_bytes: S, the whole buffer of a group: what an all-gather makes, what a reduce-scatter takes.
      groups: device numbers that communicate with each other; for a permute, pairs (from, to).
      axes: the mesh axes that the groups span, none of size 1; None if no mesh was given, or they span part of one.
      times: how often it runs in one call of the program, if every conditional takes its branch.
      branches: the conditionals' branches in which it stands, outermost first.
      op_name: where in the user's program it comes from, as JAX names it; empty if the compiler made it up.
      source: `file:line` of the layer or model that it comes from; empty if the text does not say.
      tensors: dotted paths of the arguments of which it gathers, or whose gradients it reduces; none if it moves
        activations, or if what it moves was mixed on the way.
      line: its number in the program's text.
    """

    kind: str
    arrays: tuple[Array, ...]
    full_bytes: int
    groups: Groups
    axes: tuple[str, ...] | None
    times: int
    branches: tuple[str, ...]
    op_name: str
    source: str
    tensors: tuple[str, ...]
    line: int = 0

    @property
    def group_size(self) -> int:
        """n, devices of a group, the largest if they differ; of a permute, 2."""
        return max(map(len, self.groups), default=1)

    @property
    def place(self) -> str:
        """`source`; what XLA made up or combined has none, but perhaps a tensor or a name."""
        return self.source or next(iter(self.tensors), self.op_name)

    @property
    def sent_bytes(self) -> Fraction:
        """Bytes that a device sends each time; of devices that differ, the one that sends most.

        Communication: (n-1)/n S; 2(n-1)/n S for an all-reduce; S for a permute or broadcast that moves anything; for
        a ragged all-to-all (n-1)/n S at most, as its sizes are data.
        """
        if self.kind in ("collective_permute", "collective_broadcast"):
            return Fraction(self.full_bytes * any(len(set(group)) > 1 for group in self.groups))
        n = self.group_size
        return (2 if self.kind == "all_reduce" else 1) * Fraction(n - 1, n) * self.full_bytes


def collectives_of(compiled: Compiled | str, mesh: AnyMesh | None = None) -> list[Collective]:
    """All collectives of an optimized program, in the order of its text from the entry on.

    Args:
      compiled: the program, or its `as_text()`.
      mesh: the mesh it was compiled for, which names the axes of the groups.

    Raises:
      ProgramError: lists every collective in the text that was not counted: of an unknown kind or form, out of
        reach of the entry, or in a loop of unknown length.
    """
    program = Program(compiled if isinstance(compiled, str) else compiled.as_text() or "")
    return found_in(program, list(walk(program)), mesh)


def found_in(program: Program, visits: list[Visit], mesh: AnyMesh | None, flow: Flow | None = None) -> list[Collective]:
    """The same, of a program that was read and walked already, and its data flow."""
    if mesh is not None and mesh.size != program.num_devices:
        raise ProgramError(f"the program is for {program.num_devices} devices, the mesh has {mesh.size}")
    found = [(visit, kind) for visit in visits if (kind := _kind(visit.instruction))]
    _require_all_counted(program, visits, [visit for visit, _ in found])
    flow = flow or Flow(program)
    return [_collective(program, flow, visit, kind, mesh) for visit, kind in found]


def total_sent_bytes(
    found: Iterable[Collective], kind: str | None = None, axes: Iterable[str] | None = None
) -> Fraction:
    """Bytes that a device sends in one call: all, or of one kind, or over just these axes.

    Branches of a conditional count as if each was taken: where they communicate, the sum is an upper bound.
    """
    wanted = None if axes is None else set(axes)
    of_kind = (c for c in found if kind in (None, c.kind))
    return sum((c.times * c.sent_bytes for c in of_kind if wanted in (None, set(c.axes or ()))), Fraction(0))


def _kind(one: Instruction) -> str | None:
    kind = KINDS.get(one.opcode.removesuffix("-start"))
    # TPU programs spell a reduce-scatter as a fusion of this name around an all-reduce and a slice.
    scatters = kind == "all_reduce" and one.computation.startswith("all-reduce-scatter")
    return "reduce_scatter" if scatters else kind


def _collective(program: Program, flow: Flow, visit: Visit, kind: str, mesh: AnyMesh | None) -> Collective:
    one, permutes = visit.instruction, kind == "collective_permute"
    groups = find_groups(one.attributes, "source_target_pairs" if permutes else "replica_groups", program.num_devices)
    arrays = _results(one)
    share_of = max(map(len, groups), default=1) if one.opcode.startswith("reduce-scatter") else 1
    span = differing_axes if permutes else spanned_axes
    return Collective(
        kind=kind,
        arrays=arrays,
        full_bytes=share_of * sum(array.num_bytes for array in arrays),
        groups=groups,
        axes=None if mesh is None else span(groups, mesh),
        times=visit.times or 0,
        branches=visit.branches,
        op_name=one.op_name,
        source=program.source(one),
        tensors=flow.gathers(one) or flow.updates(one),
        line=one.line,
    )


def _results(one: Instruction) -> tuple[Array, ...]:
    """The arrays that a collective makes; a start but an all-reduce's is typed (operands, results, contexts...)."""
    type_ = one.type
    if one.opcode.endswith("-start") and one.opcode != "all-reduce-start":
        type_ = _ELEMENT.findall(_LAYOUT.sub("", type_)[1:-1])[1]
    arrays = arrays_of(type_)
    if not arrays:
        raise ProgramError(f"line {one.line}: {one.opcode} makes no array: {one.type}")
    return arrays


def _require_all_counted(program: Program, visits: list[Visit], counted: list[Visit]) -> None:
    problems = Problems()
    for visit in counted:
        if visit.times is None:
            what = f"runs in a loop of unknown length ({visit.instruction.op_name})"
            problems.add(_place(program, visit.instruction.line), what, "a loop with a static number of turns")
    reached = {visit.instruction.line for visit in visits}
    lines = {visit.instruction.line for visit in counted}
    for number, line in enumerate(program.lines, start=1):
        if number not in lines and _communicates(line):
            what = "is of a kind that is not known" if number in reached else "is not reached from the entry"
            problems.add(_place(program, number), what)
    problems.raise_any(ProgramError, f"{len(problems)} collective{'s' * (len(problems) > 1)} cannot be counted:")


def _communicates(line: str) -> bool:
    # A send to the host is a callback's, unless the host passes it on to another slice.
    to_host = "is_host_transfer=true" in line and "megascale" not in line
    return not to_host and bool(_COMMUNICATES.search(unquoted(line)))


def _place(program: Program, line: int) -> str:
    return f"line {line}: {unquoted(program.lines[line - 1]).strip()[:160]}"
