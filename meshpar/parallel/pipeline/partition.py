"""Assigns layers to the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshpar.errors import ScheduleError
from meshpar.parallel.pipeline.model import LayerCounts
from meshpar.parallel.pipeline.schedule import Schedule


@dataclass(frozen=True)
class StagePartition:
    """The layers of each chunk of each stage.

    Args:
      layers: int32 [stage, chunk, n], indices of layers; -1 where a chunk has fewer than n.
    """

    layers: np.ndarray

    @property
    def longest(self) -> int:
        """n, the number of layers of the longest chunk."""
        return self.layers.shape[2]

    @property
    def is_even(self) -> bool:
        return bool((self.layers >= 0).all())

    def of(self, first: int, num_layers: int) -> StagePartition:
        """The partition of the stack that begins with layer `first`, whose layers are numbered from 0.

        >>> StagePartition(np.array([[[0, 1, 2]], [[3, 4, -1]]])).of(2, 3).layers.tolist()
        [[[0, -1]], [[1, 2]]]
        """
        own = [[chunk[(chunk >= first) & (chunk < first + num_layers)] - first for chunk in row] for row in self.layers]
        layers = np.full((*self.layers.shape[:2], max(len(chunk) for row in own for chunk in row)), -1, np.int32)
        for stage, row in enumerate(own):
            for place, chunk in enumerate(row):
                layers[stage, place, : len(chunk)] = chunk
        return StagePartition(layers)

    def lies_in_order(self, stored: int) -> bool:
        """Whether each stage computes with the layers that it stores, in that order, if it stores `stored` layers."""
        own = self.layers.reshape(len(self.layers), -1)
        there = np.arange(len(own))[:, None] * stored + np.arange(own.shape[1])
        return own.shape[1] == stored and bool(((own == there) | (own < 0)).all())


def cut_layers(
    schedule: Schedule, num_stages: int, num_layers: int, head: float = 0.0, stacked_layers: int | None = None
) -> StagePartition:
    """The schedule's `cut`, or else the one that makes the most expensive virtual stage cheapest.

    Args:
      head: the cost of the output projection and the loss, in layers.
      stacked_layers: number of stored layers, padding included. Default: `num_layers`.

    Raises:
      ScheduleError: `cut` has another number of layers or virtual stages, or there are too few layers.
    """
    stacked = stacked_layers or num_layers
    stored = stacked // num_stages
    as_stored = tuple(min(stored, num_layers - stored * stage) for stage in range(num_stages))
    if schedule.cut:
        counts = schedule.cut
    elif stacked > num_layers and schedule.chunks_per_stage == 1 and min(as_stored) > 0:
        counts = as_stored  # with padding: no layer moves, and no stage has more to compute
    else:
        counts = _by_cost(num_layers, num_stages * schedule.chunks_per_stage, head)
    return _partition(counts, schedule, num_stages, num_layers)


def _partition(counts: tuple[int, ...], schedule: Schedule, num_stages: int, num_layers: int) -> StagePartition:
    _check(counts, schedule, num_stages, num_layers)
    layers = np.full((num_stages, schedule.chunks_per_stage, max(counts)), -1, np.int32)
    first = 0
    for virtual, count in enumerate(counts):
        stage = schedule.stage_of(virtual, num_stages)
        layers[stage, virtual // num_stages, :count] = range(first, first + count)
        first += count
    return StagePartition(layers)


def cut_stacks(schedule: Schedule, num_stages: int, stacks: LayerCounts) -> StagePartition:
    """As `cut_layers`, for stacks that follow each other. Layers are numbered through.

    Raises:
      ScheduleError: as in `cut_layers`.
    """
    costs = [1.0] * stacks.num_layers
    for stack, cost in zip(stacks.then, stacks.costs, strict=True):
        costs += [cost] * stack.num_layers
    num_virtual = num_stages * schedule.chunks_per_stage
    is_enough = len(costs) >= num_virtual
    fairest = _fairest(costs, num_virtual, stacks.head) if is_enough else _by_cost(len(costs), num_virtual, 0.0)
    return _partition(schedule.cut or fairest, schedule, num_stages, len(costs))


def _fairest(costs: Sequence[float], num_parts: int, head: float) -> tuple[int, ...]:
    """How many layers, one after the other, each part gets so that the most expensive one is cheapest.

    >>> _fairest([1.0] * 4 + [2.0] * 4, 4, 0.0), _fairest([1.0] * 8, 4, 3.0)
    ((3, 2, 1, 2), (2, 2, 3, 1))
    """
    total = [0.0, *np.cumsum(costs)]
    num = len(costs)
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(0, 0): (0.0, ())}
    for part in range(1, num_parts + 1):
        for stop in range(part, num - num_parts + part + 1):
            more = head if part == num_parts else 0.0
            found = []
            for start in range(part - 1, stop):
                if before := best.get((part - 1, start)):
                    cost = max(before[0], total[stop] - total[start] + more)
                    found.append((cost, (*before[1], stop - start)))
            best[part, stop] = min(found)
    return best[num_parts, num][1]


def _by_cost(num_layers: int, num_virtual: int, head: float) -> tuple[int, ...]:
    """Equal counts; each layer of the remainder goes to the virtual stage that is cheapest so far.

    >>> _by_cost(8, 4, 3.0), _by_cost(7, 4, 0.0), _by_cost(7, 4, 0.5)
    ((2, 2, 2, 2), (2, 2, 2, 1), (2, 2, 2, 1))
    """
    counts = [num_layers // num_virtual] * num_virtual
    for _ in range(num_layers % num_virtual):
        costs = [count + head * (k == num_virtual - 1) for k, count in enumerate(counts)]
        counts[costs.index(min(costs))] += 1
    return tuple(counts)


def _check(counts: tuple[int, ...], schedule: Schedule, num_stages: int, num_layers: int) -> None:
    num_virtual = num_stages * schedule.chunks_per_stage
    parts = f"{num_virtual} parts ({num_stages} stages x {schedule.chunks_per_stage} chunks)"
    if len(counts) != num_virtual or sum(counts) != num_layers:
        cut = f"parallel.pipeline.cut has {len(counts)} parts with {sum(counts)} layers in all"
        raise ScheduleError(f"{cut}; it must have {parts} with {num_layers} layers in all")
    if min(counts) < 1:
        fixes = ["fewer stages"] + ["a smaller parallel.pipeline.num_chunks"] * hasattr(schedule, "num_chunks")
        what = f"{num_layers} layers cannot be cut into {parts}: each part needs at least one layer"
        raise ScheduleError(f"{what}; {', or '.join(fixes)}")
