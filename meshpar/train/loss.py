"""What a loss says of its rows: sums and a count, so that means are taken over all devices' tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import pydantic

from meshpar.config import Config
from meshpar.imports import Target
from meshpar.parallel import tensor
from meshpar.sharding.rules import AxisRules

Batch = dict[str, jax.Array]
TEACHER = "teacher"
"""The array of a batch that holds the teacher's logits."""


@dataclass(frozen=True)
class Tally:
    """What a loss says of the rows at hand.

    Args:
      loss: float[]. The sum of their losses.
      count: int32[]. Of what it is the sum: tokens, rows, pixels.
      metrics: name -> float[]. Other sums over the same, reported as means.
      carried: what the next step gets, like what this one got: batch statistics, for instance.
    """

    loss: jax.Array
    count: jax.Array
    metrics: dict[str, jax.Array] = field(default_factory=dict)
    carried: Any = field(default_factory=dict)

    @property
    def sums(self) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """What is added up over microbatches and devices."""
        return self.loss, self.count, self.metrics


jax.tree_util.register_dataclass(Tally, ["loss", "count", "metrics", "carried"], [])

Loss = Callable[[Any, Batch, jax.Array | None, Any], Tally]
"""(params, batch, key, carried) -> `Tally`, of the rows at hand."""


class Distill(Config):
    """A teacher, whose distribution over the next token the model learns beside the text's.

    The loss is `(1 - weight) * cross entropy + weight * temperature^2 * KL(teacher || model)`, both distributions of
    the divergence softened by the temperature.

    Source: Hinton et al. 2015, arXiv:1503.02531.
    """

    teacher: Path
    """The run directory of the teacher: its last checkpoint, and the config that is kept there."""
    temperature: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)] = 1.0
    weight: Annotated[float, pydantic.Field(ge=0, le=1)] = 0.5
    """Of the divergence; the cross entropy has the rest."""
    rules: AxisRules | None = None
    """Where the teacher's parameters lie, on the mesh of the run. Default: the run's rules."""

    def add(self, nll: jax.Array, logits: jax.Array, teacher: jax.Array, vocab_size: int) -> jax.Array:
        """The loss of each token, from its cross entropy and both models' logits."""
        kl = tensor.divergence(logits, teacher, vocab_size, self.temperature)
        return (1 - self.weight) * nll + self.weight * self.temperature**2 * kl


class Criterion(Config):
    """What is minimized: the next token's cross entropy, and what is added to it; or a loss of the user's own.

    Evaluations leave out what is added, so that runs can be compared.
    """

    shorthand: ClassVar = "target"
    target: Target | None = None
    """Of a model that is imported: `package.module:name` of its own loss; see `meshpar.imported`."""
    label_smoothing: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.0
    """The part of the target's probability that is spread evenly over the vocabulary."""
    z_loss: Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the squared logarithm of the softmax's denominator; 1e-4 keeps logits from drifting."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _from_target(cls, value: Any) -> Any:
        return {"target": value} if isinstance(value, str) else value

    @pydantic.model_validator(mode="after")
    def _one_loss(self) -> Criterion:
        if self.target and (self.label_smoothing or self.z_loss):
            raise ValueError("label_smoothing and z_loss are of the next token's cross entropy, not of a target")
        return self

    def build(self, apply: Callable[..., jax.Array], vocab_size: int, distill: Distill | None = None) -> Loss:
        """The loss of a step; without any of these settings it is `next_token_loss(apply, vocab_size)`."""

        def each(logits: jax.Array, targets: jax.Array, batch: Batch) -> jax.Array:
            nll = tensor.cross_entropy(logits, targets, vocab_size, self.label_smoothing, self.z_loss)
            return distill.add(nll, logits, batch[TEACHER], vocab_size) if distill else nll

        return _summed(apply, each)


def next_token_loss(apply: Callable[..., jax.Array], vocab_size: int) -> Loss:
    """Cross entropy of `targets`, those that are -1 not counted.

    Args:
      apply: (params, batch, key) -> logits [batch, seq, vocab], local shards of the vocabulary.
      vocab_size: logits at or beyond it are padding.
    """
    return _summed(apply, lambda logits, targets, batch: tensor.cross_entropy(logits, targets, vocab_size))


def _summed(apply: Callable[..., jax.Array], each: Callable[..., jax.Array]) -> Loss:
    """The sum of what each token costs: (logits, targets, batch) -> [batch, seq]."""

    def loss(params: Any, batch: Batch, key: jax.Array | None, carried: Any) -> Tally:
        counted = batch["targets"] >= 0
        logits = apply(params, batch, key)
        costs = each(logits, jnp.where(counted, batch["targets"], 0), batch)
        total = jnp.where(counted, costs, jnp.zeros_like(costs)).sum()
        return Tally(total, counted.sum(dtype=jnp.int32), carried=carried)

    return loss


def summed_cross_entropy(logits: jax.Array, batch: Batch, vocab_size: int) -> tuple[jax.Array, jax.Array]:
    """(sum, count) over the targets that are not -1."""
    counted = batch["targets"] >= 0
    nll = tensor.cross_entropy(logits, jnp.where(counted, batch["targets"], 0), vocab_size)
    return jnp.where(counted, nll, jnp.zeros_like(nll)).sum(), counted.sum(dtype=jnp.int32)
