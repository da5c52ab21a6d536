"""The loss of a language model: a sum and a count, so that means are taken over all devices' tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.parallel import tensor

Batch = dict[str, jax.Array]
Loss = Callable[[Any, Batch, jax.Array | None], tuple[jax.Array, jax.Array]]
"""(params, batch, key) -> (sum of losses, number of tokens), of the rows at hand."""


def next_token_loss(apply: Callable[..., jax.Array], vocab_size: int) -> Loss:
    """Cross entropy of `targets`, those that are -1 not counted.

    Args:
      apply: (params, batch, key) -> logits [batch, seq, vocab], local shards of the vocabulary.
      vocab_size: logits at or beyond it are padding.
    """

    def loss(params: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        return summed_cross_entropy(apply(params, batch, key), batch, vocab_size)

    return loss


def summed_cross_entropy(logits: jax.Array, batch: Batch, vocab_size: int) -> tuple[jax.Array, jax.Array]:
    """(sum, count) over the targets that are not -1."""
    counted = batch["targets"] >= 0
    nll = tensor.cross_entropy(logits, jnp.where(counted, batch["targets"], 0), vocab_size)
    return jnp.where(counted, nll, jnp.zeros_like(nll)).sum(), counted.sum(dtype=jnp.int32)
