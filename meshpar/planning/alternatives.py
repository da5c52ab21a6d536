"""Finds the figures of a machine with which another traced layout would be the fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log2

from meshpar.planning.machine import Machine
from meshpar.planning.search import Candidate
from meshpar.planning.space import Layout
from meshpar.tree import human_bytes

FARTHEST = 16.0
"""The largest factor, up or down, by which a figure is changed."""
STEPS_PER_DOUBLING = 4
MARGIN = 1.01
"""Another layout wins if the first one takes this much longer."""


@dataclass(frozen=True)
class Alternative:
    """A change of one figure of the machine, and the layout that is fastest then."""

    figure: str
    layout: Layout

    def __str__(self) -> str:
        return f"with {self.figure}: {self.layout}"


def alternatives(machine: Machine, candidates: Sequence[Candidate], best: Candidate, at_most: int) -> list[Alternative]:
    """The nearest change of each figure that makes another layout win, the nearest first.

    Args:
      candidates: traced layouts, including those that need more than `at_most` bytes on a device.
    """

    def winner(machine: Machine, limit: float) -> Candidate | None:
        """The layout that is faster than `best`, which may not fit any more; None if there is none."""
        fitting = [one for one in candidates if one.estimate.total_bytes <= limit]
        times = {one.layout: one.work.on(machine).total_s for one in fitting}
        first = min(fitting, key=lambda one: times[one.layout], default=None)
        is_other = first and times.get(best.layout, float("inf")) > MARGIN * times[first.layout]
        return first if is_other else None

    found: list[tuple[float, Alternative]] = []
    for figure in machine.figures:
        change = _nearest(lambda factor, figure=figure: winner(figure.scaled(factor), at_most))
        if change:
            factor, other = change
            found.append(
                (abs(log2(factor)), Alternative(f"{shown(figure.value * factor)} {figure.name}", other.layout))
            )
    change = _nearest(lambda factor: winner(machine, at_most * factor))
    if change:
        factor, other = change
        memory = f"{human_bytes(at_most * factor)} of memory on a device"
        found.append((abs(log2(factor)), Alternative(memory, other.layout)))
    return [alternative for _, alternative in sorted(found, key=lambda one: one[0])]


def shown(value: float) -> str:
    """A figure in three digits.

    >>> shown(1391.2), shown(3.724)
    ('1,391', '3.72')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _nearest(winner: Callable[[float], Candidate | None]) -> tuple[float, Candidate] | None:
    """The factor nearest to 1 for which there is a winner."""
    for step in range(1, int(STEPS_PER_DOUBLING * log2(FARTHEST)) + 1):
        for factor in (2 ** (step / STEPS_PER_DOUBLING), 2 ** (-step / STEPS_PER_DOUBLING)):
            if one := winner(factor):
                return factor, one
    return None
