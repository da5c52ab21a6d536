"""Which checkpoints a run writes, and which of them stay."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import pydantic

from meshpar.config import Config, Count, Positive


class Kept(Config):
    """How often a checkpoint is written, and which stay: the latest, and the best.

    >>> sorted(Kept(keep=1, keep_best=2).chosen({1: 3.0, 2: 2.0, 3: 2.5, 4: None, 5: float("nan")}))
    [2, 3, 5]
    """

    shorthand: ClassVar[str | None] = "every"

    every: Positive | None = None
    """Steps between checkpoints; default: only by time, and at the end."""
    every_minutes: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)] | None = 15.0
    """Minutes after which a checkpoint is written too; null for never."""
    keep: Positive = 2
    """So many of the latest stay."""
    keep_best: Count = 0
    """And so many of the best, by `metric`."""
    metric: str = "loss"
    """Of the evaluation at the checkpoint's step."""
    best: Literal["lowest", "highest"] = "lowest"
    """Which value of the metric is the best."""

    def without_end(self) -> Kept:
        """All of the latest stay.

        >>> sorted(Kept(keep=1).without_end().chosen({1: None, 2: None}))
        [1, 2]
        """
        return self.model_copy(update={"keep": sys.maxsize})

    def ranked(self, metrics: Mapping[int, float | None]) -> list[int]:
        """Steps from the best to the worst, of equals the latest first; without those that have no number."""
        sign = 1 if self.best == "lowest" else -1
        known = {step: sign * value for step, value in metrics.items() if value is not None and value == value}
        return sorted(known, key=lambda step: (known[step], -step))

    def chosen(self, metrics: Mapping[int, float | None]) -> set[int]:
        """Which of the steps stay.

        Args:
          metrics: the metric of each step that is there; None where it was not evaluated.
        """
        return {*sorted(metrics)[-self.keep :], *self.ranked(metrics)[: self.keep_best]}
