"""Computes the steps at which the rounds of local updates end.

Source: Gu et al. 2023, arXiv:2310.14423 (rounds that grow as the learning rate falls).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Rounds:
    """The ends of the rounds of a run.

    Args:
      ends: the last step of each round, sorted; the first step is 1. Rounds of different fragments alternate.
      start: the steps before the first round.
      num_fragments: see `LocalUpdates.fragments`.
      overlap_steps: steps from the end of a round to its outer step.
    """

    ends: Sequence[int]
    start: int = 0
    num_fragments: int = 1
    overlap_steps: int = 0

    @property
    def mean_steps(self) -> Fraction:
        """The mean number of steps of a round."""
        return self.mean_steps_between * self.num_fragments

    @property
    def mean_steps_between(self) -> Fraction:
        """The mean number of steps between two ends, which belong to different fragments if there are several."""
        return Fraction(self.ends[-1] - self.start, len(self.ends))

    def fragment(self, step: int) -> int | None:
        """The fragment whose round ends after this step; None if none does.

        >>> [Rounds(range(2, 9, 2), num_fragments=2).fragment(step) for step in range(1, 9)]
        [None, 0, None, 1, None, 0, None, 1]
        """
        index = bisect_left(self.ends, step)
        return index % self.num_fragments if index < len(self.ends) and self.ends[index] == step else None


def quadratic(every: int, growth: float, learning_rate: Callable[[Any], Any], first: int, last: int) -> tuple[int, ...]:
    """The ends of rounds of `max(every, floor((growth / lr)^2))` steps, for the learning rate at which a round begins.

    The rule reads the largest later learning rate, so that a warm-up counts as the rate after it. The last round ends
    at `last`.

    Args:
      learning_rate: int[steps], numbers of updates made -> float[steps].
      first: the steps before the first round.
      last: the last step.

    >>> quadratic(2, 1.0, lambda updates: 1 / (1 + updates), first=0, last=20)
    (2, 11, 20)
    """
    rates = np.asarray(learning_rate(np.arange(last)), np.float64)
    later = np.maximum.accumulate(rates[::-1])[::-1]
    ends: list[int] = []
    step = first
    while step < last:
        longest = (growth / later[step]) ** 2 if later[step] else last
        step += max(every, int(min(longest, last)))
        ends.append(min(step, last))
    return tuple(ends)
