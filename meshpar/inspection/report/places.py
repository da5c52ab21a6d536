"""Groups collectives by their place in the code, for the text and the page."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from meshpar.inspection.report.plain import PlainCollective


@dataclass(frozen=True)
class CollectivePlace:
    """All collectives of one kind, over the same axes, from one line of code.

    Args:
      axes: such as `fsdp, tensor`, or `part of fsdp`.
      in_branch: whether they run only if a conditional takes their branch.
      times: how often they run in sum.
      sent_bytes: bytes that a device sends in all of them.
      names: their tensors, the one that sends most first; the shapes, if they move activations.
    """

    kind: str
    axes: str
    source: str
    in_branch: bool
    times: float
    sent_bytes: float
    names: tuple[str, ...]

    @property
    def what(self) -> str:
        """The first of the names, and the number of the others."""
        return ", ".join(self.names[:1]) + (f" and {len(self.names) - 1} more" if len(self.names) > 1 else "")


def places(collectives: Iterable[PlainCollective]) -> list[CollectivePlace]:
    """The places of collectives, most bytes first."""
    groups = defaultdict(list)
    for one in collectives:
        groups[one.kind, axes_name(one.axes, one.is_in_parts), one.source, bool(one.branches)].append(one)
    found = []
    for (kind, axes, source, in_branch), group in sorted(groups.items()):
        group.sort(key=lambda one: one.total_bytes, reverse=True)
        names = dict.fromkeys(tensor for one in group for tensor in one.tensors)
        names = names or dict.fromkeys(array for one in group for array in one.arrays)
        times = sum(one.times for one in group)
        sent_bytes = sum(one.total_bytes for one in group)
        found.append(CollectivePlace(kind, axes, source, in_branch, times, sent_bytes, tuple(names)))
    return sorted(found, key=lambda place: place.sent_bytes, reverse=True)


def axes_name(axes: tuple[str, ...] | None, is_in_parts: bool = False) -> str:
    """`fsdp, tensor`; without a mesh, axes are unknown.

    >>> axes_name(("expert",), is_in_parts=True)
    'part of expert'
    """
    name = "unknown axes" if axes is None else ", ".join(axes) or "none"
    return f"part of {name}" if is_in_parts else name


def times_text(times: float | Fraction) -> str:
    """The number of executions of a collective, with at most two decimals.

    >>> times_text(12), times_text(1.5)
    ('12x', '1.5x')
    """
    return f"{float(times):.2f}".rstrip("0").rstrip(".") + "x"


def short_source(source: str) -> str:
    """`file:line` relative to the working directory; the last two names of a file elsewhere."""
    here = os.getcwd() + os.sep
    return source.removeprefix(here) if source.startswith(here) else "/".join(source.split("/")[-2:])
