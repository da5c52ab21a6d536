"""The stages of a pipeline: which layers each has, and the cut with which the slowest is as fast as it can be."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from meshpar.parallel.pipeline.schedule import Schedule


@dataclass(frozen=True)
class Busy:
    """Seconds for which a device works in a step; in a pipeline, a device of one stage.

    Args:
      waits: axes -> seconds of the collectives over them that products wait for.
    """

    products: float
    others: float
    waits: dict[tuple[str, ...], float]

    @property
    def total(self) -> float:
        return self.products + self.others + sum(self.waits.values())

    def __add__(self, other: Busy) -> Busy:
        every = self.waits | other.waits
        waits = {axes: self.waits.get(axes, 0.0) + other.waits.get(axes, 0.0) for axes in every}
        return Busy(self.products + other.products, self.others + other.others, waits)

    def __mul__(self, factor: float) -> Busy:
        waits = {axes: seconds * factor for axes, seconds in self.waits.items()}
        return Busy(self.products * factor, self.others * factor, waits)


NOTHING = Busy(0.0, 0.0, {})


def balanced(
    num_layers: int, seconds: Sequence[float], ends: Sequence[float], least: int = 1, most: int | None = None
) -> list[int]:
    """The number of layers of each stage with which the slowest stage is as fast as it can be.

    Each layer goes to the stage that ends first with it. That is optimal, because a stage with more layers is slower:
    a cut with a faster slowest stage would have fewer layers on this stage, and more on one that ends later.

    Args:
      seconds: of one layer, on each stage.
      ends: seconds of each stage beside its layers.
      least, most: layers that each stage has at least, and at most.

    >>> balanced(8, [1.0, 1.0, 1.0], [0.0, 0.0, 2.0])
    [3, 3, 2]
    >>> balanced(9, [1.0, 2.0], [0.0, 0.0])
    [6, 3]
    """
    counts = [least] * len(seconds)

    def with_one_more(stage: int) -> tuple[float, int, int]:
        return ends[stage] + (counts[stage] + 1) * seconds[stage], counts[stage], stage

    first = [with_one_more(stage) for stage in range(len(seconds))]
    heapq.heapify(first)
    for _ in range(num_layers - sum(counts)):
        stage = first[0][-1]
        counts[stage] += 1
        if counts[stage] == most:
            heapq.heappop(first)
        else:
            heapq.heapreplace(first, with_one_more(stage))
    return counts


def cut_with(schedule: Schedule, counts: Sequence[int]) -> tuple[int, ...]:
    """The cut that gives each stage so many layers: the number of layers of each virtual stage, first to last."""
    chunks = schedule.chunks_per_stage
    num_stages = len(counts)
    cut = []
    for virtual in range(num_stages * chunks):
        each, more = divmod(counts[schedule.stage_of(virtual, num_stages)], chunks)
        cut.append(each + (virtual // num_stages < more))
    return tuple(cut)
