"""Regression: numbers for each row."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from meshpar.config import Coerced, default
from meshpar.errors import ConfigError
from meshpar.parallel.precision import wide
from meshpar.train.loss import Batch, LossSums
from meshpar.train.tasks.base import (
    NamedLoss,
    RowMetric,
    counted_sum,
    label_of,
    number_of_rows,
)  # fmt: skip
from meshpar.train.tasks.metrics import r2
from meshpar.tree import flatten_with_paths


class Regress(NamedLoss):
    """The mean over the rows of the squared error of numbers. The model returns an array like `label`."""

    kind: Literal["regress"] = "regress"
    label: str = "label"
    """The array of the numbers that are predicted, one or several a row."""
    error: Literal["squared", "absolute"] = "squared"
    """What is minimized: the mean of a row's squared or absolute errors."""
    metrics: Coerced[tuple[Literal["mse", "rmse", "mae", "r2"], ...], list[str]] = default(("rmse", "mae"))
    """`mse`, `rmse`, `mae`; `r2`, the fraction of the variance that is explained."""

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.label,)

    def sums(self, outputs: Any, batch: Batch, more: Any, is_training: bool) -> LossSums:
        predicted, labels = self._compared(outputs, batch)
        error = predicted - labels
        squared, absolute = (_mean_of_row(x) for x in (jnp.square(error), jnp.abs(error)))
        losses = squared if self.error == "squared" else absolute
        metrics = {}
        if {"mse", "rmse"} & {*self.metrics}:
            metrics["mse"] = counted_sum(squared, batch)
        if "mae" in self.metrics:
            metrics["mae"] = counted_sum(absolute, batch)
        return LossSums(counted_sum(losses, batch), number_of_rows(batch), metrics)

    def of_means(self, means: Any) -> dict[str, float]:
        return {"rmse": means["mse"] ** 0.5} if "rmse" in self.metrics else {}

    def of_rows(self, outputs: Any, batch: Batch) -> dict[str, jax.Array]:
        if "r2" not in self.metrics:
            return {}
        predicted, labels = self._compared(outputs, batch)
        return {"predicted": predicted, "label": labels}

    @property
    def row_metrics(self) -> dict[str, RowMetric]:
        return {"r2": r2} if "r2" in self.metrics else {}

    def _compared(self, outputs: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        labels = label_of(batch, self.label, "label")
        if getattr(outputs, "shape", None) == (*labels.shape, 1):
            outputs = outputs[..., 0]
        if getattr(outputs, "shape", None) != labels.shape:
            shapes = [list(jnp.shape(x)) for x in flatten_with_paths(outputs).values()]
            what = f"loss.label = {self.label}: the model returns {shapes}, and the labels are {list(labels.shape)}"
            raise ConfigError(f"{what}; an output for each number")
        predicted = wide(outputs)
        return predicted, labels.astype(predicted.dtype)


def _mean_of_row(x: jax.Array) -> jax.Array:
    return x.mean(tuple(range(1, x.ndim)))
