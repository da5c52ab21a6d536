"""The cross entropy of a language model as a function of arrays, for models of the user's own.

Shapes: D embed, V vocab; `*rows` are the dims of the labels, such as [batch, seq].
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meshpar.mesh.varying import Axes
from meshpar.parallel.context import manual_axes
from meshpar.train import token_loss
from meshpar.train.chunks import Chunk, Cost
from meshpar.train.loss import LossSums
from meshpar.train.projected import VOCAB, summed_over_logits


def cross_entropy(
    hidden: Float[Array, "*rows D"], head: Float[Array, "D V"], labels: Int[Array, "*rows"], *,
    chunk: Chunk = "auto", label_smoothing: float = 0.0, z_loss: float = 0.0, cap: float | None = None,
) -> LossSums:  # fmt: skip
    """The cross entropy of the logits `hidden @ head` with `labels`. No device holds all logits.

    Meshpar's own models train on the same. A loss may return the result, or `sums.loss / sums.count` plus other terms.

    Args:
      hidden: the output of the last norm.
      head: the kernel of the output projection; of tied embeddings `embedding.T`.
      labels: of each token. Negative labels do not count.
      chunk: the tokens whose logits a device holds at a time; `none` holds all; `auto` uses chunks if they need less
        memory.
      label_smoothing: the share of the label's probability that is spread evenly over the vocabulary.
      z_loss: weight of `log(sum(exp(logits)))^2`, which keeps the logits from drifting.
      cap: logits are `cap * tanh(logits / cap)`, as in Gemma 2.

    Returns:
      The sum over the labels that count, and their number.

    Memory: logits and their gradient, of one chunk; the gradients of `hidden` and `head`, computed with the loss.
    Numerics: logits have the dtype of `hidden`; what follows is in float32 at least.
    Communication: over axes that shard the vocabulary see `token_loss.cross_entropy`; backward the gradient of `hidden`
      is summed. Where the tokens are sharded, the sum is one term of each device's.

    Raises:
      ValueError: shapes that do not fit; a `chunk` that is no number of tokens; a `cap` that is not positive.

    >>> sums = cross_entropy(jnp.ones((2, 3, 4)), jnp.zeros((4, 8)), jnp.array([[1, 2, -1], [3, 4, -1]]))
    >>> round(float(sums.loss) / int(sums.count), 4), int(sums.count)  # log(8)
    (2.0794, 4)
    """
    hidden, head, labels = map(jnp.asarray, (hidden, head, labels))
    _check(hidden, head, labels, chunk, cap)
    vocab_size = head.shape[1] * math.prod(map(lax.axis_size, manual_axes(VOCAB)))

    def cost_over(axes: Axes) -> Cost:
        def cost(logits: jax.Array, labels: jax.Array, _: Any) -> jax.Array:
            logits = logits if cap is None else cap * jnp.tanh(logits / cap)
            counted = labels >= 0
            targets = jnp.where(counted, labels, 0)
            each = token_loss.cross_entropy(logits, targets, vocab_size, label_smoothing, z_loss, axes)
            return jnp.where(counted, each, jnp.zeros_like(each)).sum()

        return cost

    total = summed_over_logits(cost_over, hidden, head, labels, None, chunk)
    return LossSums(total, (labels >= 0).sum(dtype=jnp.int32))


def _check(hidden: Any, head: Any, labels: Any, chunk: Any, cap: float | None) -> None:
    shapes = jnp.shape(hidden), jnp.shape(head), jnp.shape(labels)
    if len(shapes[1]) != 2 or not shapes[2] or shapes[0] != (*shapes[2], shapes[1][0]):
        what = f"hidden {shapes[0]}, head {shapes[1]}, labels {shapes[2]}"
        raise ValueError(f"{what}: has to be [..., embed], [embed, vocab] and [...]; of an embedding pass embedding.T")
    if chunk not in ("auto", "none") and (type(chunk) is not int or chunk < 1):
        raise ValueError(f"chunk={chunk!r}: has to be auto, none, or a number of tokens")
    if cap is not None and not cap > 0:
        raise ValueError(f"cap={cap}: has to be positive; None for no cap")
