"""What a loss says of its rows: sums and a count, so that means are taken over all devices' tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.parallel import tensor

Batch = dict[str, jax.Array]


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


def next_token_loss(apply: Callable[..., jax.Array], vocab_size: int) -> Loss:
    """Cross entropy of `targets`, those that are -1 not counted.

    Args:
      apply: (params, batch, key) -> logits [batch, seq, vocab], local shards of the vocabulary.
      vocab_size: logits at or beyond it are padding.
    """

    def loss(params: Any, batch: Batch, key: jax.Array | None, carried: Any) -> Tally:
        counted = batch["targets"] >= 0
        logits = apply(params, batch, key)
        nll = tensor.cross_entropy(logits, jnp.where(counted, batch["targets"], 0), vocab_size)
        total = jnp.where(counted, nll, jnp.zeros_like(nll)).sum()
        return Tally(total, counted.sum(dtype=jnp.int32), carried=carried)

    return loss
