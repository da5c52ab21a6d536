"""What the losses that a config names have in common: a task of any model that is called with arrays of a batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.config import Config
from meshpar.data.rows.spec import COUNTED
from meshpar.errors import ConfigError
from meshpar.train.loss import Batch, LossSums
from meshpar.tree import flatten_with_paths

RowMetric = Callable[[Mapping[str, np.ndarray]], float]
"""The results of all evaluated rows, name -> array[rows, ...] -> a number."""


class NamedLoss(Config):
    """A loss of the outputs of a model. Rows that do not count (`counted` is 0) change neither loss nor metrics."""

    target: ClassVar[None] = None

    @property
    @abstractmethod
    def labels(self) -> tuple[str, ...]:
        """The arrays of a batch that the loss compares the outputs with, and the model is not called with."""

    def inputs(self, batch: Batch, key: jax.Array | None) -> tuple[Batch, Any]:
        """The arrays that the model may be called with, and what `sums` needs besides the batch.

        Args:
          key: None in an evaluation.
        """
        return {name: x for name, x in batch.items() if name not in (*self.labels, COUNTED, "rows")}, None

    @abstractmethod
    def sums(self, outputs: Any, batch: Batch, more: Any, is_training: bool) -> LossSums:
        """The loss and the metrics that are means, as sums over the rows that count."""

    def of_rows(self, outputs: Any, batch: Batch) -> dict[str, jax.Array]:
        """What the metrics of all rows together need of each row: name -> array[rows, ...]; none if there are none."""
        return {}

    @property
    def row_metrics(self) -> dict[str, RowMetric]:
        """The metrics of all rows together, such as F1, which no mean over batches gives."""
        return {}

    def of_means(self, means: Mapping[str, float]) -> dict[str, float]:
        """Metrics that follow from the means of an evaluation."""
        return {}

    def bounds(self, outputs: Any) -> dict[str, int]:
        """Array of labels -> the number of classes, by the shapes of the outputs."""
        return {}


def only_array(outputs: Any, what: str, ndim: int) -> jax.Array:
    """The single array that a model returns.

    Raises:
      ConfigError: it returns something else.
    """
    if getattr(outputs, "ndim", None) == ndim:
        return outputs
    shapes = {path or "the output": list(jnp.shape(x)) for path, x in flatten_with_paths(outputs).items()}
    raise ConfigError(f"the model returns {shapes}, and the loss needs {what}")


def label_of(batch: Batch, name: str, key: str) -> jax.Array:
    """An array of the batch that a key of the loss names.

    Raises:
      ConfigError: there is none.
    """
    if name not in batch:
        there = ", ".join(one for one in batch if one not in (COUNTED, "rows"))
        raise ConfigError(f"loss.{key} = {name}: the rows have no such array; they have {there}")
    return batch[name]


def counted_sum(x: jax.Array, batch: Batch) -> jax.Array:
    """The sum of x[rows] over the rows that count."""
    return jnp.where(batch[COUNTED] > 0, x, jnp.zeros_like(x)).sum()


def number_of_rows(batch: Batch) -> jax.Array:
    return batch[COUNTED].sum(dtype=jnp.int32)
