"""Early stopping, as a function of what was recorded: so a run that goes on remembers how long it has waited."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pydantic

from meshpar.config import Config, Positive
from meshpar.errors import ConfigError


class EarlyStopping(Config):
    """Ends a run whose evaluations have stopped getting better. The last state is saved, as at any end."""

    metric: str = "loss"
    """Of the evaluations: `loss`, or what a callback gives."""
    best: Literal["lowest", "highest"] = "lowest"
    """Which value of the metric is the best."""
    patience: Positive
    """How many evaluations in a row may be no better than the best before them."""
    min_delta: Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)] = 0.0
    """By how much an evaluation must be better to count as such."""

    def verdict(self, evaluations: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """What to record if the run should end after these evaluations; None if it should go on.

        Raises:
          ConfigError: the last of them has no such metric.

        >>> told = [{"step": 10 * i, "loss": loss} for i, loss in enumerate([3.0, 2.0, 2.5, float("nan")])]
        >>> EarlyStopping(patience=3).verdict(told)
        >>> EarlyStopping(patience=2).verdict(told)["why"]
        'loss was best at step 10, 2.0000, and no better in 2 evaluations since'
        """
        if not evaluations:
            return None
        if self.metric not in evaluations[-1]:
            there = ", ".join(name for name in evaluations[-1] if name not in ("kind", "step"))
            raise ConfigError(f"early_stopping.metric: no evaluation has {self.metric!r}; there are {there}")
        best, waited = None, 0
        for record in evaluations:
            best, waited = (record, 0) if self._is_better(record, best) else (best, waited + 1)
        if waited < self.patience or best is None:
            return None
        said = f"{self.metric} was best at step {best['step']}, {best[self.metric]:.4f}"
        by = f" by more than {self.min_delta}" if self.min_delta else ""
        why = f"{said}, and no better{by} in {waited} evaluations since"
        return {"why": why, "best": best[self.metric], "best_step": best["step"]}

    def _is_better(self, record: dict[str, Any], best: dict[str, Any] | None) -> bool:
        value = record.get(self.metric)
        if value is None or not math.isfinite(value):  # what is not finite reads as null from a file
            return False
        gain = lambda best: best - value if self.best == "lowest" else value - best
        return best is None or gain(best[self.metric]) > self.min_delta
