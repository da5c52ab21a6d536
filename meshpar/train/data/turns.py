"""Whose turn it is: the parts of a mixture take rows by their weights, evenly from the first row on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

LONGEST = 10_000


@dataclass(frozen=True)
class Turns:
    """A sequence of parts, in which each prefix of n rows holds n x weight rows of each part, within one row.

    Args:
      weights: in whole numbers: of a period of `sum(weights)` rows, so many are of each part.

    Source: the quota method of Balinski and Young, "The Quota Method of Apportionment" (1975): of the parts that
    would not get ahead of their share, the next row is for the one whose share falls due first.

    >>> Turns((2, 1)).of(np.arange(6))[0].tolist()
    [0, 0, 1, 0, 0, 1]
    """

    weights: tuple[int, ...]

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each row int64[...] of the sequence: its part, and how many rows of that part come before it."""
        period, at = np.divmod(rows, sum(self.weights))
        parts, before = self._period
        part = parts[at]
        return part, period * np.array(self.weights)[part] + before[at]

    @cached_property
    def _period(self) -> tuple[np.ndarray, np.ndarray]:
        total, taken = sum(self.weights), [0] * len(self.weights)
        parts, before = [], []
        for n in range(1, total + 1):
            behind = [p for p, weight in enumerate(self.weights) if taken[p] * total < n * weight]
            part = min(behind, key=lambda p: Fraction(taken[p] + 1, self.weights[p]))
            parts.append(part)
            before.append(taken[part])
            taken[part] += 1
        return np.array(parts), np.array(before)


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the proportions of `weights`, each taken as it is written.

    >>> whole_weights([0.7, 0.3]), whole_weights([2, 1.5])
    ((7, 3), (4, 3))
    """
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    return tuple(weight // math.gcd(*whole) for weight in whole)
