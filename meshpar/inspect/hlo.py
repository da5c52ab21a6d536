"""The collectives of a compiled program, read from its text: kind, axes, bytes, and how often each runs.

The text is walked from its entry through every called computation, loops multiplied by their trip counts. A
second, independent count of the words in the raw text must agree, so that nothing passes unseen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
from jax.sharding import Mesh

from meshpar.errors import ProgramError
from meshpar.inspect.groups import Groups, parse_groups

KINDS = {
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "ragged_all_to_all",
    "collective-permute": "collective_permute",
    "collective-broadcast": "collective_broadcast",
}
_BITS = {"pred": 8, "token": 0, "opaque": 0}
_OPCODE = "|".join(sorted(KINDS, key=len, reverse=True))
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<type>\(.*?\)|\S+) (?P<opcode>[\w\-]+)\((?P<operands>.*)$")
_COLLECTIVE = re.compile(rf"^({_OPCODE})(-start)?$")
_RAW = re.compile(rf"[\])}}] (?:{_OPCODE})(?:-start)?\(")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(r"(?:to_apply|calls|called_computations|true_computation|false_computation)=\{?%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Args:
      kind: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `collective_permute`, ...
      full_bytes: S, the whole buffer of a group: what an all-gather makes, what a reduce-scatter takes.
      groups: device numbers that communicate with each other; for a permute, pairs (from, to).
      axes: the mesh axes that the groups span; None if no mesh was given, or they span none exactly.
      times: how often it runs in one call of the program.
      branches: the conditionals' branches in which it stands, outermost first.
      op_name: where in the user's program it comes from, as JAX names it.
    """

    kind: str
    full_bytes: int
    groups: Groups
    axes: tuple[str, ...] | None
    times: int
    branches: tuple[str, ...]
    op_name: str

    @property
    def group_size(self) -> int:
        return max(map(len, self.groups), default=1)

    @property
    def sent_bytes(self) -> Fraction:
        """Bytes that a device sends each time: (n-1)/n S, twice that for an all-reduce, S for a permute."""
        if self.kind in ("collective_permute", "collective_broadcast"):
            return Fraction(self.full_bytes if any(a != b for a, *b in self._pairs) else 0)
        n = self.group_size
        return (2 if self.kind == "all_reduce" else 1) * Fraction(n - 1, n) * self.full_bytes

    @property
    def _pairs(self) -> Iterator[tuple[int, ...]]:
        return ((group[0], *group[1:2]) for group in self.groups)


def collectives(text: str, mesh: Mesh | None = None) -> list[Collective]:
    """All collectives of an optimized program.

    Args:
      text: `jax.stages.Compiled.as_text()`.
      mesh: names the axes of the groups.

    Raises:
      ProgramError: a collective in the text was not counted, or stands in a loop of unknown length.
    """
    program = _Program(text, mesh)
    found = list(program.walk(program.entry, 1, ()))
    seen, written = len(program.seen), len(_RAW.findall(text))
    if seen != written:
        raise ProgramError(f"{written} collectives stand in the text, {seen} were reached from its entry")
    return found


def total_sent_bytes(
    found: Iterable[Collective], kind: str | None = None, axes: Iterable[str] | None = None
) -> Fraction:
    """Bytes that a device sends in one call: all, or of one kind, or over just these axes."""
    wanted = None if axes is None else set(axes)
    of_kind = (c for c in found if kind in (None, c.kind))
    return sum((c.times * c.sent_bytes for c in of_kind if wanted in (None, set(c.axes or ()))), Fraction(0))


class _Program:
    """The computations of a program by name, walked in the order of execution."""

    def __init__(self, text: str, mesh: Mesh | None):
        self.mesh = mesh
        self.num_devices = _num_devices(text)
        self.seen: set[str] = set()
        self.computations: dict[str, list[str]] = {}
        self.entry = ""
        for line in text.splitlines():
            self._read(line)

    def _read(self, line: str) -> None:
        if match := _COMPUTATION.match(line):
            self.current = match[2]
            self.computations[self.current] = []
            self.entry = self.current if match[1] else self.entry
        elif " = " in line and self.computations:
            self.computations[self.current].append(line)

    def walk(self, name: str, times: int, branches: tuple[str, ...]) -> Iterator[Collective]:
        for line in self.computations.get(name, []):
            match = _INSTRUCTION.match(line)
            if not match:
                continue
            if kind := _COLLECTIVE.match(match["opcode"]):
                self.seen.add(line)
                one = self._collective(KINDS[kind[1]], bool(kind[2]), match["type"], line)
                yield replace(one, times=times, branches=branches)
            elif match["opcode"] == "while":
                yield from self._loop(line, times, branches)
            else:
                yield from self._calls(line, times, branches)

    def _loop(self, line: str, times: int, branches: tuple[str, ...]) -> Iterator[Collective]:
        condition, body = (re.search(rf"{part}=%?([\w.\-]+)", line)[1] for part in ("condition", "body"))  # pyright: ignore
        known = _TRIP_COUNT.search(line)
        count = int(known[1]) if known else self._count_from(condition)
        inside = [*self.walk(body, 1, branches), *self.walk(condition, 1, branches)]
        if inside and count is None:
            raise ProgramError(f"a loop of unknown length holds {inside[0].kind} ({inside[0].op_name})")
        for one in inside:
            yield replace(one, times=one.times * times * (count or 0))

    def _count_from(self, condition: str) -> int | None:
        """TPU programs state a loop's length as the one integer constant in its condition."""
        constants = re.findall(r"= s32\[\]\S* constant\((\d+)\)", "\n".join(self.computations.get(condition, [])))
        return int(constants[0]) if len(constants) == 1 else None

    def _calls(self, line: str, times: int, branches: tuple[str, ...]) -> Iterator[Collective]:
        for name in _CALLED.findall(line):
            yield from self.walk(name, times, branches)
        for listed in _BRANCHES.findall(line):
            for name in re.findall(r"[\w.\-]+", listed):
                yield from self.walk(name, times, (*branches, name))

    def _collective(self, kind: str, starts: bool, type_: str, line: str) -> Collective:
        groups = self._groups(kind, line)
        sizes = [_bytes(*array) for array in _ARRAY.findall(type_)]
        if starts and kind in ("all_gather", "collective_permute"):
            sizes = sizes[len(sizes) // 2 :] if kind == "all_gather" else sizes[1:2]  # (operands, results, contexts)
        size = sum(sizes) * (max(map(len, groups)) if kind == "reduce_scatter" else 1)
        name = re.search(r'op_name="([^"]*)"', line)
        return Collective(kind, size, groups, self._axes(kind, groups), 1, (), name[1] if name else "")

    def _groups(self, kind: str, line: str) -> Groups:
        attribute = "source_target_pairs" if kind == "collective_permute" else "replica_groups"
        match = re.search(rf"{attribute}=(\{{\{{.*?\}}\}}|\{{\}}|mesh\[.*?\] ?\{{.*?\}}|\[\S+\]<=\S+?)(?:,|$|\s)", line)
        if not match:
            raise ProgramError(f"no {attribute} in: {line.strip()[:200]}")
        return parse_groups(match[1], self.num_devices)

    def _axes(self, kind: str, groups: Groups) -> tuple[str, ...] | None:
        """The axes along which devices of a group differ, where the groups are exactly those of such axes."""
        if self.mesh is None:
            return None
        coordinates = {int(i): at for at, i in np.ndenumerate(_positions(self.mesh))}
        differ = {
            axis
            for group in groups
            for a, b in pairwise(group)
            for axis, x, y in zip(self.mesh.axis_names, coordinates[a], coordinates[b], strict=True)
            if x != y
        }
        spanned = math.prod(self.mesh.shape[axis] for axis in differ)
        if kind != "collective_permute" and spanned != max(map(len, groups), default=1):
            return None
        return tuple(axis for axis in self.mesh.axis_names if axis in differ)


def _positions(mesh: Mesh) -> np.ndarray:
    """The number of each device in the program: its place in the order of the mesh's flattened devices."""
    return np.arange(mesh.size).reshape(mesh.devices.shape)


def _num_devices(text: str) -> int:
    counts = [int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", text[:10000])]
    return math.prod(counts) if counts else 1


def _bytes(dtype: str, shape: str) -> int:
    digits = re.search(r"\d+", dtype)
    bits = _BITS.get(dtype, int(digits[0]) if digits else 0)
    return math.prod(int(size) for size in shape.split(",") if size) * bits // 8
