"""Assigns layers to the stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshpar.errors import ScheduleError
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
    _check(counts, schedule, num_stages, num_layers)
    layers = np.full((num_stages, schedule.chunks_per_stage, max(counts)), -1, np.int32)
    first = 0
    for virtual, count in enumerate(counts):
        stage = schedule.stage_of(virtual, num_stages)
        layers[stage, virtual // num_stages, :count] = range(first, first + count)
        first += count
    return StagePartition(layers)


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
        raise ScheduleError(f"{num_layers} layers cannot be cut into {parts}: each part needs at least one layer")
