"""Compares two programs: bytes by axis, collectives, FLOPs and memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from meshpar.inspection.program.memory import Memory
from meshpar.inspection.report.places import axes_name, times_text
from meshpar.inspection.report.plain import PlainInspection, plain
from meshpar.inspection.report.table import table
from meshpar.mesh.layout import describe_sizes
from meshpar.tree import human_bytes

Figure = TypeVar("Figure")
_Key = tuple[str, str, tuple[str, ...], bool]


@dataclass(frozen=True)
class FigureChange(Generic[Figure]):
    """A figure of two programs, before and after a change.

    >>> print(FigureChange(800, 600).by)
    -200 (-25.0%)
    """

    before: Figure
    after: Figure

    def __bool__(self) -> bool:
        """Whether the figures differ."""
        return self.before != self.after

    def text(self, to_text: Callable[[Figure], str]) -> str:
        """Both figures as text, or one figure if they are equal."""
        return f"{to_text(self.before)} -> {to_text(self.after)}" if self else to_text(self.before)

    @property
    def by(self) -> str:
        """The change of a number, absolute and relative; `same` if there is none."""
        before = int(self.before)  # pyright: ignore[reportArgumentType]
        change = int(self.after) - before  # pyright: ignore[reportArgumentType]
        part = f" ({change / before:+,.1%})" if before else ""
        return f"{change:+,}{part}" if self else "same"


@dataclass(frozen=True)
class CollectiveChange:
    """Collectives of both programs that have the same kind and axes and move the same data.

    Args:
      axes: such as `fsdp, tensor`.
      what: their tensors; for activations, the last two names of their source file. Line numbers are left out, because
        an edit above them would change them.
      in_branch: whether they run only if a conditional takes their branch.
      times: how often they run in a step.
      sent_bytes: bytes that a device sends in all of them.
    """

    kind: str
    axes: str
    what: tuple[str, ...]
    in_branch: bool
    times: FigureChange[float]
    sent_bytes: FigureChange[int]

    @property
    def verdict(self) -> str:
        """`new` or `gone`; else `more often` or `less often`; else `larger` or `smaller`."""
        if not self.times.before or not self.times.after:
            return "new" if self.times.after else "gone"
        if self.times:
            return "more often" if self.times.after > self.times.before else "less often"
        return "larger" if self.sent_bytes.after > self.sent_bytes.before else "smaller"


@dataclass(frozen=True)
class Difference:
    """The figures of two programs, for one device and one step.

    Args:
      per_axis: bytes sent over each combination of axes.
      collectives: the collectives that changed, those with most bytes first.
      flops: FLOPs of matrix products.
      memory: bytes by kind: arguments by path, `outputs`, `temporaries`.
      total: bytes held.
    """

    mesh: FigureChange[dict[str, int]]
    sent_bytes: FigureChange[int]
    per_axis: Mapping[str, FigureChange[int]]
    collectives: tuple[CollectiveChange, ...]
    flops: FigureChange[int]
    memory: Mapping[str, FigureChange[int]]
    total: FigureChange[int]

    def __bool__(self) -> bool:
        """Whether the programs differ."""
        numbers = (self.sent_bytes, self.flops, self.total, *self.per_axis.values(), *self.memory.values())
        return bool(self.mesh or self.collectives or any(numbers))

    def as_json(self) -> dict[str, Any]:
        """The difference as plain data."""
        return {
            "differs": bool(self),
            "mesh": asdict(self.mesh),
            "sent_bytes": asdict(self.sent_bytes),
            "sent_bytes_per_axis": {axes: asdict(change) for axes, change in self.per_axis.items()},
            "collectives": [{"change": one.verdict} | asdict(one) for one in self.collectives],
            "flops": asdict(self.flops),
            "memory": {name: asdict(change) for name, change in self.memory.items()},
            "memory_total": asdict(self.total),
        }

    def __str__(self) -> str:
        if not self:
            return "no difference"
        parts = [
            f"mesh: {self.mesh.text(describe_sizes)}",
            f"sends {self.sent_bytes.text(human_bytes)}\n{_numbers('over', self.per_axis)}",
            _collectives(self.collectives),
            f"matrix products: {self.flops.text('{:,}'.format)} FLOPs",
            f"holds {self.total.text(human_bytes)}\n{_numbers('', self.memory)}",
        ]
        return "\n\n".join(["a device, in one step, before -> after", *parts])


def difference(before: Mapping[str, Any] | PlainInspection, after: Mapping[str, Any] | PlainInspection) -> Difference:
    """Compares two programs by the plain data of their inspections, as `as_json()` returns it."""
    a, b = plain(before), plain(after)
    return Difference(
        mesh=FigureChange(_sizes(a.mesh), _sizes(b.mesh)),
        sent_bytes=FigureChange(a.sent_bytes, b.sent_bytes),
        per_axis=_changes(a.sent_bytes_per_axis, b.sent_bytes_per_axis),
        collectives=_collective_changes(a, b),
        flops=FigureChange(a.flops, b.flops),
        memory=_changes(_kinds(a.memory), _kinds(b.memory)),
        total=FigureChange(a.memory.total, b.memory.total),
    )


def _collective_changes(before: PlainInspection, after: PlainInspection) -> tuple[CollectiveChange, ...]:
    times: dict[_Key, list[float]] = defaultdict(lambda: [0, 0])
    sent_bytes: dict[_Key, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for side, program in enumerate((before, after)):
        for one in program.collectives:
            file = "/".join(one.source.rpartition(":")[0].split("/")[-2:])
            axes = axes_name(one.axes, one.is_in_parts)
            key = (one.kind, axes, tuple(sorted(one.tensors)) or (file,), bool(one.branches))
            times[key][side] += one.times
            sent_bytes[key][side] += one.total_bytes
    made = []
    for key in times:
        before_bytes, after_bytes = map(round, sent_bytes[key])
        made.append(CollectiveChange(*key, FigureChange(*times[key]), FigureChange(before_bytes, after_bytes)))
    changed = [one for one in made if one.times or one.sent_bytes]
    return tuple(sorted(changed, key=lambda one: max(one.sent_bytes.before, one.sent_bytes.after), reverse=True))


def _changes(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, FigureChange[int]]:
    return {name: FigureChange(before.get(name, 0), after.get(name, 0)) for name in dict.fromkeys([*before, *after])}


def _kinds(memory: Memory) -> dict[str, int]:
    return memory.arguments | {"outputs": memory.outputs, "temporaries": memory.temporaries}


def _sizes(mesh: Mapping[str, int]) -> dict[str, int]:
    """The sizes without axes of size 1."""
    return {axis: size for axis, size in mesh.items() if size != 1}


# As text ---------------------------------------------------------------------------------------------------------


def _numbers(head: str, changes: Mapping[str, FigureChange[int]]) -> str:
    rows = [[name, f"{one.before:,}", f"{one.after:,}", one.by] for name, one in changes.items()]
    return table([head, "before", "after", "change"], rows)


def _collectives(found: tuple[CollectiveChange, ...]) -> str:
    if not found:
        return "the same collectives"
    rows = []
    for one in found:
        kind = f"{one.kind} in a branch" if one.in_branch else one.kind
        what = one.what[0] + (f" and {len(one.what) - 1} more" if len(one.what) > 1 else "")
        times = one.times.text(times_text)
        rows.append([one.verdict, kind, one.axes, times, one.sent_bytes.text(human_bytes), what])
    return f"collectives\n{table(['', '', 'over', 'times', 'bytes', 'what or where'], rows)}"
