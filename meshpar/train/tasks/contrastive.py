"""Contrastive pairs, as in CLIP: the two embeddings of a row are closer to each other than to those of other rows."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from pydantic import Field, field_validator

from meshpar.config import Strings, default
from meshpar.data.rows.spec import COUNTED
from meshpar.errors import ConfigError
from meshpar.parallel.precision import wide
from meshpar.train.loss import Batch, LossSums
from meshpar.train.tasks.base import NamedLoss, RowMetric, counted_sum, number_of_rows
from meshpar.train.tasks.metrics import recall

RECALL = re.compile(r"recall_at_([1-9][0-9]{0,3})")
TEMPERATURE = 0.07
FAR = -1e9
"""A similarity that counts for nothing."""


class Contrastive(NamedLoss):
    """The symmetric cross entropy of pairs: each row is compared with all rows of the batch.

    The model returns two embeddings [rows, features], `(a, b)`, or `(a, b, scale)` with a learned factor of their
    products. They are divided by their lengths.

    Source: Radford et al. 2021, arXiv:2103.00020.
    """

    kind: Literal["contrastive"] = "contrastive"
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Divides the products of embeddings if the model returns no scale. Default: 0.07."""
    metrics: Strings = default(("recall_at_1",))
    """`recall_at_1`, or another number: the fraction of rows whose `b` is among the nearest of `a`, of all held-out
    rows."""

    @field_validator("metrics")
    @classmethod
    def _are_known(cls, metrics: tuple[str, ...]) -> tuple[str, ...]:
        for name in metrics:
            if not RECALL.fullmatch(name):
                raise ValueError(f"{name!r} is no metric of pairs; there is recall_at_1, or another number")
        return metrics

    @property
    def labels(self) -> tuple[str, ...]:
        return ()

    def sums(self, outputs: Any, batch: Batch, more: Any, is_training: bool) -> LossSums:
        a, b, scale = self._pairs(outputs)
        products = scale * (a @ b.T)
        is_counted = batch[COUNTED] > 0
        both = (products, products.T)
        losses = jnp.zeros(a.shape[0], products.dtype)
        right = (a * b).sum(-1) * scale
        for one in both:
            total = jax.nn.logsumexp(jnp.where(is_counted[None, :], one, jnp.asarray(FAR, one.dtype)), axis=-1)
            losses = losses + (total - right) / 2
        return LossSums(counted_sum(losses, batch), number_of_rows(batch))

    def of_rows(self, outputs: Any, batch: Batch) -> dict[str, jax.Array]:
        if not self.metrics:
            return {}
        a, b, _ = self._pairs(outputs)
        return {"a": a, "b": b}

    @property
    def row_metrics(self) -> dict[str, RowMetric]:
        return {name: partial(recall, within=int(RECALL.fullmatch(name)[1])) for name in self.metrics}  # pyright: ignore

    def _pairs(self, outputs: Any) -> tuple[jax.Array, jax.Array, Any]:
        is_pair = isinstance(outputs, (tuple, list)) and len(outputs) in (2, 3)
        shapes = [jnp.shape(x) for x in outputs] if is_pair else []
        if not is_pair or len(shapes[0]) != 2 or shapes[0] != shapes[1] or (len(shapes) == 3 and shapes[2]):
            shown = [list(shape) for shape in shapes] or type(outputs).__name__
            need = "(a, b) or (a, b, scale), with a and b of the shape [rows, features], and a number as the scale"
            raise ConfigError(f"the model returns {shown}, and the loss needs {need}")
        a, b = (_normalized(wide(x)) for x in outputs[:2])
        if len(outputs) == 2:
            return a, b, jnp.asarray(1 / (self.temperature or TEMPERATURE), a.dtype)
        if self.temperature is not None:
            what = f"loss.temperature = {self.temperature}: the model returns a scale, which is used instead"
            raise ConfigError(f"{what}; no temperature, or a model that returns (a, b)")
        return a, b, wide(outputs[2])


def _normalized(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + jnp.asarray(1e-12, x.dtype))
