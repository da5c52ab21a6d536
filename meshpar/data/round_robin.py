"""Interleaves the parts of a mixture by their weights, evenly from the first row on.

Grain's `MapDataset.mix` also interleaves by weight, but its order differs from the parts' shares by several rows: by
3.1 for the weights 26, 1, 24, 3, 8, 40.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

LONGEST = 10_000


@dataclass(frozen=True)
class WeightedRoundRobin:
    """The order of the parts: of the first n rows, each part has n x weight / sum(weights), within one row.

    Args:
      weights: integers, not all 0. In each period of `sum(weights)` rows, a part has `weight` rows.

    Source: the quota method of Balinski and Young, "The Quota Method of Apportionment" (1975): among the parts that
    would not exceed their share, the next row goes to the one whose next row is due first.

    >>> WeightedRoundRobin((2, 1)).of(np.arange(6))[0].tolist()
    [0, 0, 1, 0, 0, 1]
    """

    weights: tuple[int, ...]

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each row int64[...] of the sequence: its part, and the number of earlier rows of that part."""
        period, at = np.divmod(rows, sum(self.weights))
        parts, before = self._period
        part = parts[at]
        return part, period * np.array(self.weights)[part] + before[at]

    def counts(self, num: int) -> np.ndarray:
        """How many of the first `num` rows are of each part, int64[parts]."""
        periods, rest = divmod(num, sum(self.weights))
        begun = np.bincount(self.of(np.arange(rest))[0], minlength=len(self.weights))
        return begun + periods * np.array(self.weights)

    @cached_property
    def _period(self) -> tuple[np.ndarray, np.ndarray]:
        total = sum(self.weights)
        taken = [0] * len(self.weights)
        parts = []
        before = []
        for n in range(1, total + 1):
            behind = [p for p, weight in enumerate(self.weights) if taken[p] * total < n * weight]
            part = min(behind, key=lambda p: (taken[p] + 1) / self.weights[p])  # equal fractions are equal floats
            parts.append(part)
            before.append(taken[part])
            taken[part] += 1
        return np.array(parts), np.array(before)


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest integers in the proportions of `weights`. Decimal digits are exact: 0.1 is 1/10.

    >>> whole_weights([0.7, 0.3]), whole_weights([2, 1.5])
    ((7, 3), (4, 3))
    """
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    return tuple(weight // math.gcd(*whole) for weight in whole)


def check_period(weights: Sequence[float], name: str = "weights") -> None:
    """Raises ValueError, with the fix, if the order of these weights repeats after more than `LONGEST` rows."""
    whole = whole_weights(weights)
    period = sum(whole)
    if period > LONGEST:
        rounded = ", ".join(str(max(round(1000 * weight / period), int(weight > 0))) for weight in whole)
        what = f"{name} have too many digits: they repeat every {period} rows, more than {LONGEST}"
        raise ValueError(f"{what}\nround them, for example to {rounded}")
