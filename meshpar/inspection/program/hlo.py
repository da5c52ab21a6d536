"""Reads the collectives of a compiled program from its text: kind, axes, bytes, and number of executions.

The walk starts at the entry, follows every call and multiplies by the trip counts of loops. Independently, all lines
are searched for signs of communication. A line with such a sign that was not counted is an error, so no collective is
missed.

Communication inside a custom call (the remote copies of a Pallas kernel) is not counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from jax.stages import Compiled

from meshpar.errors import Problems, ProgramError
from meshpar.inspection.program.flow import Flow
from meshpar.inspection.program.groups import Groups, are_parts, find_groups, spanned_axes
from meshpar.inspection.program.text import LAYOUT, ArrayType, Instruction, Program, arrays_of, unquoted
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
# Deliberately not made from KINDS, to find collectives that KINDS lacks.
_COMMUNICATES = re.compile(
    r"\breplica_groups=|\bsource_target_pairs="
    r"|[\])}] (?:all-|collective|ragged|reduce-scatter|send)[\w\-]*(?<!-done)(?<!-update)\("
)
_SIGNS = ("replica_groups=", "source_target_pairs=", "all-", "collective", "ragged", "reduce-scatter", "send")
"""One of them is in every line that `_COMMUNICATES` matches, whose search takes longer."""


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Args:
      kind: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `collective_permute`, ...
      arrays: the results on a device; several if XLA combined collectives, or split the buffer.
      full_bytes: S, the whole buffer of a group: the output of an all-gather, the input of a reduce-scatter.
      groups: numbers of the devices that communicate with each other; for a permute, pairs (source, target).
      axes: the mesh axes along which the devices of a group differ; None without a mesh.
      is_in_parts: whether a group has only some of the devices along these axes. False for a permute.
      num_devices: the number of devices of the program.
      times: how often it runs in one call of the program; every branch of a conditional counts as taken, unless its
        scope states how often it is taken, which may be a fraction, see `walk.Visit`.
      branches: the branches of conditionals that contain it, outermost first.
      op_name: JAX's name for the operation of the user's program; empty if the compiler added the collective.
      instruction: its line in the program.
      flow: the data flow of the program.
    """

    kind: str
    arrays: tuple[ArrayType, ...]
    full_bytes: int
    groups: Groups
    axes: tuple[str, ...] | None
    is_in_parts: bool
    num_devices: int
    times: Fraction
    branches: tuple[str, ...]
    op_name: str
    instruction: Instruction = field(repr=False)
    flow: Flow = field(repr=False, compare=False)

    @property
    def line(self) -> int:
        """The number of its line in the program's text."""
        return self.instruction.line

    # These two are cached properties: only reports need them, and following the data takes longer than counting bytes.

    @cached_property
    def source(self) -> str:
        """`file:line` of the layer or model that communicates; empty if unknown."""
        return self.flow.program.source(self.instruction)

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """Dotted paths of the parameters that the collective gathers, or whose gradients it reduces.

        Empty for activations, and if arithmetic mixes the data in between.
        """
        return self.flow.gathers(self.instruction) or self.flow.updates(self.instruction)

    @property
    def group_size(self) -> int:
        """n, the number of devices of the largest group; 2 for a permute."""
        return max(map(len, self.groups), default=1)

    @property
    def place(self) -> str:
        """`source`; if it is unknown, the first tensor or `op_name`."""
        return self.source or next(iter(self.tensors), self.op_name)

    @property
    def sent_bytes(self) -> Fraction:
        """Bytes that a device sends in one execution; for a permute the mean over all devices, some of which send none.

        Communication: (n-1)/n S; 2(n-1)/n S for an all-reduce; S for a permute to another device, and for a broadcast
        between different devices; at most (n-1)/n S for a ragged all-to-all, whose sizes are data.
        """
        num_sent = sum(len(set(group)) > 1 for group in self.groups)
        if self.kind == "collective_permute":
            return Fraction(self.full_bytes * num_sent, self.num_devices)
        if self.kind == "collective_broadcast":
            return Fraction(self.full_bytes * (num_sent > 0))
        n = self.group_size
        return (2 if self.kind == "all_reduce" else 1) * Fraction(n - 1, n) * self.full_bytes

    @property
    def total_bytes(self) -> Fraction:
        """Bytes that a device sends in all executions."""
        return self.times * self.sent_bytes


def collectives_of(compiled: Compiled | str, mesh: AnyMesh | None = None) -> list[Collective]:
    """All collectives of a compiled program, in the order of the walk from its entry.

    Args:
      compiled: the program, or its `as_text()`.
      mesh: the mesh that the program was compiled for; without it, axes are None.

    Raises:
      ProgramError: lists every collective that cannot be counted: one of an unknown kind or form, one that the entry
        does not reach, or one in a loop of unknown length.

    Examples:
      >>> import jax
      >>> mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> total = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
      >>> compiled = jax.jit(total).lower(jax.numpy.ones(32, "float32")).compile()
      >>> [(one.kind, one.axes, float(one.sent_bytes)) for one in collectives_of(compiled, mesh)]
      [('all_reduce', ('data',), 48.0)]
    """
    program = Program(compiled if isinstance(compiled, str) else compiled.as_text() or "")
    return found_in(Flow(program), list(walk(program)), mesh)


def found_in(flow: Flow, visits: list[Visit], mesh: AnyMesh | None) -> list[Collective]:
    """`collectives_of` for a program that is already parsed and walked."""
    program = flow.program
    if mesh is not None and mesh.size != program.num_devices:
        raise ProgramError(f"the program is for {program.num_devices} devices, the mesh has {mesh.size}")
    found = [(visit, kind) for visit in visits if (kind := _kind(visit.instruction))]
    _require_all_counted(program, visits, [visit for visit, _ in found])
    begun = [(visit, kind) for visit, kind in found if not _continues(program, visit.instruction)]
    return [_collective(flow, visit, kind, mesh) for visit, kind in begun]


def total_sent_bytes(
    found: Iterable[Collective], kind: str | None = None, axes: Iterable[str] | None = None
) -> Fraction:
    """Bytes that a device sends in one call of the program.

    A branch of a conditional counts as taken, unless the conditional's scope states how often. So the sum is an upper
    bound if several branches communicate.

    Args:
      found: the result of `collectives_of`.
      kind: counts only collectives of this kind.
      axes: counts only collectives over exactly these axes.

    >>> import jax
    >>> mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> total = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
    >>> compiled = jax.jit(total).lower(jax.numpy.ones(32, "float32")).compile()
    >>> total_sent_bytes(collectives_of(compiled, mesh), axes=["data"])
    Fraction(48, 1)
    """
    wanted = None if axes is None else set(axes)
    of_kind = (c for c in found if kind in (None, c.kind))
    return sum((c.total_bytes for c in of_kind if wanted in (None, set(c.axes or ()))), Fraction(0))


def _kind(one: Instruction) -> str | None:
    kind = KINDS.get(one.opcode.removesuffix("-start"))
    # TPU programs express a reduce-scatter as a fusion of an all-reduce and a slice, with this name.
    scatters = kind == "all_reduce" and one.computation.startswith("all-reduce-scatter")
    return "reduce_scatter" if scatters else kind


def _continues(program: Program, one: Instruction) -> bool:
    """Whether the instruction is a later part of a collective that began in another computation.

    TPU programs advance a collective in the fusions that run at the same time. Its start, each of these fusions and its
    end contain the whole collective, but only the start's computation contains an `AsyncCollectiveStart`.
    """
    if "async_collective_fusion_config" not in one.rest:
        return False
    beside = program.computation(one.computation).values()
    return not any('custom_call_target="AsyncCollectiveStart"' in other.rest for other in beside)


def _collective(flow: Flow, visit: Visit, kind: str, mesh: AnyMesh | None) -> Collective:
    program, one = flow.program, visit.instruction
    permutes = kind == "collective_permute"
    groups = find_groups(one.attributes, "source_target_pairs" if permutes else "replica_groups", program.num_devices)
    arrays = _results(one)
    if kind == "ragged_all_to_all":
        arrays = min(arrays, _sent_rows(program, one) or arrays, key=lambda found: found[0].num_bytes)
    share_of = max(map(len, groups), default=1) if one.opcode.startswith("reduce-scatter") else 1
    return Collective(
        kind=kind,
        arrays=arrays,
        full_bytes=share_of * sum(array.num_bytes for array in arrays),
        groups=groups,
        axes=None if mesh is None else spanned_axes(groups, mesh),
        is_in_parts=mesh is not None and not permutes and are_parts(groups, mesh),
        num_devices=program.num_devices,
        times=visit.times or Fraction(0),
        branches=visit.branches,
        op_name=one.op_name,
        instruction=one,
        flow=flow,
    )


def _sent_rows(program: Program, one: Instruction) -> tuple[ArrayType, ...]:
    """The buffer whose rows a ragged all-to-all sends; empty if it is computed elsewhere.

    If all devices get equally many rows, the sent rows fill the smaller one of this buffer and the result.
    """
    beside = program.computation(one.computation)
    return beside[one.operands[0]].arrays if one.operands and one.operands[0] in beside else ()


def _results(one: Instruction) -> tuple[ArrayType, ...]:
    """The results of a collective."""
    # The type of a start, except that of an all-reduce, is (operands, results, contexts...).
    type_ = one.type
    if one.opcode.endswith("-start") and one.opcode != "all-reduce-start":
        type_ = _ELEMENT.findall(LAYOUT.sub("", type_)[1:-1])[1]
    arrays = arrays_of(type_)
    if not arrays:
        raise ProgramError(f"line {one.line}: {one.opcode} has no array as its result: {one.type}")
    return arrays


def _require_all_counted(program: Program, visits: list[Visit], counted: list[Visit]) -> None:
    problems = Problems()
    for visit in counted:
        if visit.times is None:
            what = f"runs in a loop of unknown length ({visit.instruction.op_name})"
            problems.add(_place(program, visit.instruction.line), what, "a loop with a static number of iterations")
    reached = {visit.instruction.line for visit in visits}
    lines = {visit.instruction.line for visit in counted}
    for number, line in enumerate(program.lines, start=1):
        # Sending to the host is a callback, unless the host forwards the data to another slice.
        to_host = "is_host_transfer=true" in line and "megascale" not in line
        if number in lines or to_host or not any(sign in line for sign in _SIGNS):
            continue
        if _COMMUNICATES.search(unquoted(line)):
            what = "is of an unknown kind" if number in reached else "is not reached from the entry"
            problems.add(_place(program, number), what)
    problems.raise_any(ProgramError, f"{len(problems)} collective{'s' * (len(problems) > 1)} cannot be counted:")


def _place(program: Program, line: int) -> str:
    return f"line {line}: {unquoted(program.lines[line - 1]).strip()[:160]}"
