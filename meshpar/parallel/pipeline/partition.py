"""Which layers lie on which stage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshpar.errors import ScheduleError
from meshpar.parallel.pipeline.schedule import Schedule


@dataclass(frozen=True)
class StagePartition:
    """The layers of each chunk.

    Args:
      layers: int32 [stage, chunk, n]: indices of layers, -1 where a chunk has fewer than n.
    """

    layers: np.ndarray

    @property
    def longest(self) -> int:
        """n: layers of the longest chunk."""
        return self.layers.shape[2]

    @property
    def is_even(self) -> bool:
        return bool((self.layers >= 0).all())

    def lies_in_order(self, stored: int) -> bool:
        """Whether the layers of each stage are those that it stores, in their places, if it stores so many."""
        own = self.layers.reshape(len(self.layers), -1)
        there = np.arange(len(own))[:, None] * stored + np.arange(own.shape[1])
        return own.shape[1] == stored and bool(((own == there) | (own < 0)).all())


def cut_layers(
    schedule: Schedule, num_stages: int, num_layers: int, head: float = 0.0, stacked_layers: int | None = None
) -> StagePartition:
    """The cut that is given, or the one by which the longest virtual stage is shortest.

    Args:
      head: what the output projection and the loss cost, in layers.
      stacked_layers: rows in which the layers are stored, if they are more than the layers.

    Raises:
      ScheduleError: a given cut is of another number of layers or virtual stages; there are too few layers.
    """
    counts = schedule.cut or _as_stored(schedule, num_stages, num_layers, stacked_layers or num_layers)
    counts = counts or _by_cost(num_layers, num_stages * schedule.chunks_per_stage, head)
    _check(counts, schedule, num_stages, num_layers)
    layers = np.full((num_stages, schedule.chunks_per_stage, max(counts)), -1, np.int32)
    first = 0
    for virtual, count in enumerate(counts):
        stage, chunk = schedule.stage_of(virtual, num_stages), virtual // num_stages
        layers[stage, chunk, :count] = range(first, first + count)
        first += count
    return StagePartition(layers)


def _as_stored(schedule: Schedule, num_stages: int, num_layers: int, stacked: int) -> tuple[int, ...] | None:
    """Every stage what it stores, if padding leaves none without a layer: no layer moves, and no stage has more."""
    most = stacked // num_stages
    counts = tuple(min(most, num_layers - most * stage) for stage in range(num_stages))
    return counts if stacked > num_layers and schedule.chunks_per_stage == 1 and min(counts) > 0 else None


def _by_cost(num_layers: int, num_virtual: int, head: float) -> tuple[int, ...]:
    """Even where that goes; else each layer that is left to the virtual stage that has least to do.

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
        given = f"parallel.pipeline.cut has {len(counts)} parts of {sum(counts)} layers"
        raise ScheduleError(f"{given}; there are {parts} and {num_layers} layers")
    if min(counts) < 1:
        raise ScheduleError(f"{num_layers} layers cannot be cut into {parts}, of a layer at least")
