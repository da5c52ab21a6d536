"""Early stopping, as a function of the records, so that a resumed run counts the evaluations before it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pydantic

from meshpar.checkpoint.retention import with_best
from meshpar.config import Config, Positive
from meshpar.errors import ConfigError


class EarlyStopping(Config):
    """Ends a run when its evaluations no longer improve. The last state is saved."""

    metric: str = "loss"
    """Metric of the evaluations: `loss`, or one that a callback returns."""
    best: Literal["lowest", "highest"] = "lowest"
    """Which values are better. Default: higher ones of `accuracy`, `top_5`, `f1`, `auc`, `r2` and `recall_at_1`, else
    lower ones."""
    patience: Positive
    """Evaluations in a row without improvement after which the run ends."""
    min_delta: Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)] = 0.0
    """Smallest change of the metric that counts as an improvement."""

    _best = pydantic.model_validator(mode="before")(with_best)

    def verdict(self, evaluations: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """The record to write if the run should end after these evaluations; None if it should continue.

        Raises:
          ConfigError: the last evaluation does not have the metric.

        >>> evaluations = [{"step": 10 * i, "loss": loss} for i, loss in enumerate([3.0, 2.0, 2.5, float("nan")])]
        >>> EarlyStopping(patience=3).verdict(evaluations)
        >>> EarlyStopping(patience=2).verdict(evaluations)["why"]
        'loss was best at step 10, 2.0000, and no better in 2 evaluations since'
        """
        if not evaluations:
            return None
        if self.metric not in evaluations[-1]:
            names = ", ".join(name for name in evaluations[-1] if name not in ("kind", "step"))
            raise ConfigError(f"early_stopping.metric: no evaluation has {self.metric!r}; there are {names}")
        reference = None
        waited = 0
        for record in evaluations:
            waited += 1
            if self._is_better(record, reference, self.min_delta):
                reference = record
                waited = 0
        if waited < self.patience or reference is None:
            return None
        best = reference
        for record in evaluations:
            best = record if self._is_better(record, best, 0.0) else best
        why = f"{self.metric} was best at step {best['step']}, {best[self.metric]:.4f}"
        if self.min_delta:
            since = f"step {reference['step']}, {reference[self.metric]:.4f}"
            why += f", and no better by more than {self.min_delta} than at {since}, in {waited} evaluations since"
        else:
            why += f", and no better in {waited} evaluations since"
        return {"why": why, "best": best[self.metric], "best_step": best["step"]}

    def _is_better(self, record: dict[str, Any], best: dict[str, Any] | None, min_delta: float) -> bool:
        value = record.get(self.metric)
        if value is None or not math.isfinite(value):  # a file stores values that are not finite as null
            return False
        if best is None:
            return True
        gain = value - best[self.metric]
        return (-gain if self.best == "lowest" else gain) > min_delta
