"""What changed from one program to another: bytes by axis, collectives, FLOPs and memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from meshpar.inspection.program.memory import Memory
from meshpar.inspection.report.places import axes_name
from meshpar.inspection.report.plain import PlainCollective, PlainInspection, plain
from meshpar.inspection.report.table import table
from meshpar.mesh.layout import describe_sizes
from meshpar.tree import human_bytes

Figure = TypeVar("Figure")
_Rows = list[list[str]]


@dataclass(frozen=True)
class Change(Generic[Figure]):
    """A figure of both programs.

    >>> print(Change(800, 600).by)
    -200 (-25.0%)
    """

    before: Figure
    after: Figure

    def __bool__(self) -> bool:
        """Whether there is any change."""
        return self.before != self.after

    def told(self, words: Callable[[Figure], str]) -> str:
        """Both in words; once, if they are equal."""
        return f"{words(self.before)} -> {words(self.after)}" if self else words(self.before)

    @property
    def by(self) -> str:
        """By how much a number grew, and by which part of itself; `same` if it did not."""
        before, after = int(self.before), int(self.after)  # pyright: ignore[reportArgumentType]
        part = f" ({(after - before) / before:+,.1%})" if before else ""
        return f"{after - before:+,}{part}" if self else "same"


@dataclass(frozen=True)
class Traded:
    """Collectives of one kind, over the same axes, that move the same, as both programs have them.

    Args:
      axes: as `fsdp, tensor`.
      what: their tensors; of activations, the file that they come from, by its last two names. Without its line, which
        an edit above would move.
      in_branch: whether they run only if a conditional takes their branch.
      times: how often they run in a step.
      sent_bytes: that a device sends in all of them.
    """

    kind: str
    axes: str
    what: tuple[str, ...]
    in_branch: bool
    times: Change[int]
    sent_bytes: Change[int]

    @property
    def verdict(self) -> str:
        """What became of them: `new`, `gone`, `more often`, `less often`, or, run as often, `larger`, `smaller`."""
        if not self.times.before or not self.times.after:
            return "new" if self.times.after else "gone"
        if self.times:
            return "more often" if self.times.after > self.times.before else "less often"
        return "larger" if self.sent_bytes.after > self.sent_bytes.before else "smaller"


@dataclass(frozen=True)
class Difference:
    """Two programs beside each other. All figures are of one device and one step.

    Args:
      per_axis: bytes sent, by combination of axes.
      collectives: those that changed, most bytes first.
      flops: of matrix products.
      memory: bytes by kind: arguments by their place, `outputs`, `temporaries`.
      total: bytes held.
    """

    mesh: Change[dict[str, int]]
    sent_bytes: Change[int]
    per_axis: Mapping[str, Change[int]]
    collectives: tuple[Traded, ...]
    flops: Change[int]
    memory: Mapping[str, Change[int]]
    total: Change[int]

    def __bool__(self) -> bool:
        """Whether there is any."""
        numbers = (self.sent_bytes, self.flops, self.total, *self.per_axis.values(), *self.memory.values())
        return bool(self.mesh or self.collectives or any(numbers))

    def as_json(self) -> dict[str, Any]:
        """The same as plain data."""
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
            f"mesh: {self.mesh.told(describe_sizes)}",
            f"sends {self.sent_bytes.told(human_bytes)}\n{_numbers('over', self.per_axis)}",
            _collectives(self.collectives),
            f"matrix products: {self.flops.told('{:,}'.format)} FLOPs",
            f"holds {self.total.told(human_bytes)}\n{_numbers('', self.memory)}",
        ]
        return "\n\n".join(["a device, in one step, before -> after", *parts])


def difference(before: Mapping[str, Any] | PlainInspection, after: Mapping[str, Any] | PlainInspection) -> Difference:
    """Compares two programs by the plain data of their inspections, `as_json()`."""
    a, b = (it if isinstance(it, PlainInspection) else plain(it) for it in (before, after))
    return Difference(
        mesh=Change(_sizes(a.mesh), _sizes(b.mesh)),
        sent_bytes=Change(a.sent_bytes, b.sent_bytes),
        per_axis=_changes(a.sent_bytes_per_axis, b.sent_bytes_per_axis),
        collectives=_traded(a.collectives, b.collectives),
        flops=Change(a.flops, b.flops),
        memory=_changes(_kinds(a.memory), _kinds(b.memory)),
        total=Change(a.memory.total, b.memory.total),
    )


class _Key(NamedTuple):
    kind: str
    axes: str
    what: tuple[str, ...]
    in_branch: bool


def _key(one: PlainCollective) -> _Key:
    """What makes it the same collective in another program, compiled from a later version of the code or elsewhere."""
    file = "/".join(one.source.rpartition(":")[0].split("/")[-2:])
    return _Key(one.kind, axes_name(one.axes), tuple(sorted(one.tensors)) or (file,), bool(one.branches))


def _traded(before: Iterable[PlainCollective], after: Iterable[PlainCollective]) -> tuple[Traded, ...]:
    a, b = _summed(before), _summed(after)
    none = (0, 0.0)
    both = ((key, a.get(key, none), b.get(key, none)) for key in dict.fromkeys([*a, *b]))
    made = (Traded(*key, Change(x[0], y[0]), Change(round(x[1]), round(y[1]))) for key, x, y in both)
    changed = (one for one in made if one.times or one.sent_bytes)
    return tuple(sorted(changed, key=lambda one: max(one.sent_bytes.before, one.sent_bytes.after), reverse=True))


def _summed(found: Iterable[PlainCollective]) -> dict[_Key, tuple[int, float]]:
    """Key -> how often they run, and bytes in all of them."""
    sums: dict[_Key, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for one in found:
        times, sent = sums[_key(one)]
        sums[_key(one)] = (times + one.times, sent + one.total_bytes)
    return dict(sums)


def _changes(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, Change[int]]:
    return {name: Change(before.get(name, 0), after.get(name, 0)) for name in dict.fromkeys([*before, *after])}


def _kinds(memory: Memory) -> dict[str, int]:
    return memory.arguments | {"outputs": memory.outputs, "temporaries": memory.temporaries}


def _sizes(mesh: Mapping[str, int]) -> dict[str, int]:
    """Without the axes that carry nothing."""
    return {axis: size for axis, size in mesh.items() if size != 1}


# As text ---------------------------------------------------------------------------------------------------------


def _numbers(head: str, changes: Mapping[str, Change[int]]) -> str:
    rows = [[name, f"{one.before:,}", f"{one.after:,}", one.by] for name, one in changes.items()]
    return table([head, "before", "after", "change"], rows)


def _collectives(found: Iterable[Traded]) -> str:
    rows = [
        [
            one.verdict,
            one.kind + " in a branch" * one.in_branch,
            one.axes,
            one.times.told("{}x".format),
            one.sent_bytes.told(human_bytes),
            one.what[0] + (f" and {len(one.what) - 1} more" if len(one.what) > 1 else ""),
        ]
        for one in found
    ]
    head = ["", "", "over", "times", "bytes", "what or where"]
    return f"collectives\n{table(head, rows)}" if rows else "the same collectives"
