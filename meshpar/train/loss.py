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
        counted = batch["targets"] >= 0
        logits = apply(params, batch, key)
        nll = tensor.cross_entropy(logits, jnp.where(counted, batch["targets"], 0), vocab_size)
        return jnp.where(counted, nll, jnp.zeros_like(nll)).sum(), counted.sum(dtype=jnp.int32)

    return loss
