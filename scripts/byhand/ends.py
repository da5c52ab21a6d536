"""Both ends of the decoder: the embedding, and the output projection with its loss; forward and backward.

The vocabulary may be sharded over `tensor`. The loss computes its gradient at once, so no logits are stored.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from byhand.axes import Axes, softmax_top
from byhand.layers import norm, norm_backward, product_over_tokens


def embed(axes: Axes, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of the table [V, D] -> [B, R, D]."""
    if not axes.tensor:
        return table[tokens]
    local = tokens - axes.first_id(table.shape[0])
    here = (local >= 0) & (local < table.shape[0])
    return axes.exit(jnp.where(here[..., None], table[jnp.where(here, local, 0)], 0.0))


def embed_backward(axes: Axes, num_rows: int, tokens: jax.Array, dx: jax.Array) -> jax.Array:
    """The gradient of the table, as a product: a scatter adds one row after the other."""
    tokens, dx = lax.optimization_barrier((tokens, axes.enter(dx)))  # else the product's left side is there throughout
    ids = axes.first_id(num_rows) + jnp.arange(num_rows)
    return (ids[:, None] == tokens.reshape(-1)).astype(dx.dtype) @ dx.reshape(-1, dx.shape[-1])


def loss(
    axes: Axes, scale: jax.Array, head: jax.Array, x: jax.Array, targets: jax.Array, count: jax.Array, vocab_size: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The loss of x [B, R, D] and the gradients of x, scale [D] and head [D, V].

    Args:
      count: the number of targets that are not -1, over all devices.
    """
    normed = axes.enter(norm(x, scale))
    logits = normed @ head
    ids = axes.first_id(head.shape[1]) + jnp.arange(head.shape[1])
    logits = jnp.where(ids < vocab_size, logits, -jnp.inf)
    hit = ids == targets[..., None]
    top = softmax_top(logits, axes)[..., None]
    powers = jnp.exp(logits - top)
    sums = axes.sum_vocab(jnp.stack([powers.sum(-1), jnp.where(hit, logits - top, 0.0).sum(-1)]))
    weight = jnp.where(targets >= 0, 1.0 / count, 0.0)
    value = ((jnp.log(sums[0]) - sums[1]) * weight).sum()
    dlogits = (powers / sums[0][..., None] - hit) * weight[..., None]
    dx, dscale = norm_backward(x, scale, axes.exit(dlogits @ head.T))
    return value, dx, dscale, product_over_tokens(normed, dlogits)
