"""Classification: a class for each row."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax
from pydantic import Field, field_validator

from meshpar.config import Strings, default
from meshpar.errors import ConfigError, suggestion
from meshpar.parallel.precision import wide
from meshpar.train.loss import Batch, LossSums
from meshpar.train.tasks.base import (
    NamedLoss,
    RowMetric,
    counted_sum,
    label_of,
    number_of_rows,
    only_array,
)  # fmt: skip
from meshpar.train.tasks.metrics import auc, f1

NAMES = ("accuracy", "f1", "auc")
TOP = re.compile(r"top_([1-9][0-9]{0,3})")


class Classify(NamedLoss):
    """Cross entropy of a class for each row. The model returns logits [rows, classes]."""

    kind: Literal["classify"] = "classify"
    label: str = "label"
    """The array of the classes, integers from 0 on; or of a probability for each class, as of mixed images."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the target's probability that the training spreads evenly over the classes."""
    metrics: Strings = default(("accuracy",))
    """`accuracy`; `top_5`, or another number; `f1`, of class 1 of two, else the mean of the classes; `auc`, of more
    than two classes the mean of each against the rest."""

    @field_validator("metrics")
    @classmethod
    def _are_known(cls, metrics: tuple[str, ...]) -> tuple[str, ...]:
        for name in metrics:
            if name not in NAMES and not TOP.fullmatch(name):
                fix = suggestion(name, (*NAMES, "top_5"), f"there are {', '.join(NAMES)}, top_5")
                raise ValueError(f"{name!r} is no metric of classes; {fix}")
        return metrics

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.label,)

    def sums(self, outputs: Any, batch: Batch, more: Any, is_training: bool) -> LossSums:
        logits, labels, targets = self._compared(outputs, batch)
        targets = optax.smooth_labels(targets, self.label_smoothing if is_training else 0.0)
        losses = optax.softmax_cross_entropy(logits, targets)
        right = jnp.take_along_axis(logits, labels[:, None], axis=-1)
        # Of equal logits that of the lowest class is the first, as in `argmax`.
        classes = jnp.arange(logits.shape[-1], dtype=labels.dtype)
        is_before = (logits > right) | ((logits == right) & (classes < labels[:, None]))
        rank = is_before.sum(-1, dtype=jnp.int32)
        metrics = {}
        for name in self.metrics:
            if name == "accuracy" or (top := TOP.fullmatch(name)):
                within = 1 if name == "accuracy" else int(top[1])  # pyright: ignore
                metrics[name] = counted_sum((rank < within).astype(losses.dtype), batch)
        return LossSums(counted_sum(losses, batch), number_of_rows(batch), metrics)

    def of_rows(self, outputs: Any, batch: Batch) -> dict[str, jax.Array]:
        if not self.row_metrics:
            return {}
        logits, labels, _ = self._compared(outputs, batch)
        found = {"label": labels}
        if "f1" in self.metrics:
            found["predicted"] = logits.argmax(-1)
        if "auc" in self.metrics:
            found["scores"] = jax.nn.softmax(logits)
        return found

    @property
    def row_metrics(self) -> dict[str, RowMetric]:
        return {name: metric for name, metric in {"f1": f1, "auc": auc}.items() if name in self.metrics}

    def bounds(self, outputs: Any) -> dict[str, int]:
        return {self.label: only_array(outputs, "logits [rows, classes]", 2).shape[-1]}

    def _compared(self, outputs: Any, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The logits [rows, classes], the class of each row, and the probability of each of its classes."""
        logits = wide(only_array(outputs, "logits [rows, classes]", 2))
        labels = label_of(batch, self.label, "label")
        if labels.ndim == 1 and jnp.issubdtype(labels.dtype, jnp.integer):
            labels = labels.astype(jnp.int32)
            return logits, labels, jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
        if labels.shape == logits.shape and jnp.issubdtype(labels.dtype, jnp.floating):
            return logits, labels.argmax(-1).astype(jnp.int32), labels.astype(logits.dtype)
        shape = f"{labels.dtype}{list(labels.shape)}"
        fix = f"one integer for each row, or a probability for each of the model's {logits.shape[-1]} classes"
        raise ConfigError(f"loss.label = {self.label}: it is {shape} in a batch; {fix}")
