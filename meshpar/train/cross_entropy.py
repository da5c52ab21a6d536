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

from meshpar.mesh.varying import invariant, varying, varying_alike
from meshpar.parallel import tensor
from meshpar.parallel.context import ACTIVATION_DIMS, current, manual_axes, tracing
from meshpar.parallel.projection import Chunk, length_on_device, summed_in_chunks
from meshpar.partition.op import apply
from meshpar.partition.signature import Call, Signature
from meshpar.train.loss import LossSums

VOCAB = "vocab"


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
    Communication: over axes that shard the vocabulary see `tensor.cross_entropy`; backward the gradient of `hidden` is
      summed. Where the tokens are sharded, the sum is one term of each device's.

    Raises:
      ValueError: shapes that do not fit; a `chunk` that is no number of tokens; a `cap` that is not positive.

    >>> sums = cross_entropy(jnp.ones((2, 3, 4)), jnp.zeros((4, 8)), jnp.array([[1, 2, -1], [3, 4, -1]]))
    >>> round(float(sums.loss) / int(sums.count), 4), int(sums.count)  # log(8)
    (2.0794, 4)
    """
    hidden, head, labels = map(jnp.asarray, (hidden, head, labels))
    _check(hidden, head, labels, chunk, cap)
    of_shards = manual_axes(VOCAB)  # of a loss that is written for local shards

    def compute(call: Call, hidden: jax.Array, head: jax.Array, labels: jax.Array) -> list[jax.Array]:
        axes = call.axes(VOCAB) or of_shards
        vocab_size = head.shape[1] * math.prod(map(lax.axis_size, axes))

        def cost(logits: jax.Array, labels: jax.Array, _: Any) -> jax.Array:
            logits = logits if cap is None else cap * jnp.tanh(logits / cap)
            counted = labels >= 0
            targets = jnp.where(counted, labels, 0)
            each = tensor.cross_entropy(logits, targets, vocab_size, label_smoothing, z_loss, axes)
            return jnp.where(counted, each, jnp.zeros_like(each)).sum()

        if labels.ndim != 2:
            split = labels.shape[:1] if labels.ndim > 2 else (1,)
            labels = labels.reshape(*split, -1)
            hidden = hidden.reshape(*labels.shape, -1)
        labels = invariant(labels, axes)  # the planner types all operands alike
        hidden, head = varying_alike(varying(hidden, axes), head)
        with tracing(current() if _has_rules(hidden, head) else None):
            return [_total(cost, chunk, hidden, head, labels)]

    rows = tuple(("rows", dim) for dim in range(labels.ndim))
    ins = ((*rows, None), (None, VOCAB), rows)
    (total,) = apply(Signature(ins, ((),), compute, summed=rows, closed=(VOCAB,)), hidden, head, labels)
    return LossSums(total, (labels >= 0).sum(dtype=jnp.int32))


def _total(cost: Any, chunk: Chunk, hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    rows, seq = labels.shape
    length = length_on_device(chunk, rows, seq, head)
    if length is None:
        return cost(jnp.einsum("bsd,dv->bsv", hidden, head), labels, None)
    return summed_in_chunks(cost, length, hidden, head, labels, None)


def _has_rules(hidden: jax.Array, head: jax.Array) -> bool:
    """Whether GSPMD is to shard these arrays by the rules of their dims; local shards need none."""
    ctx = current()
    if ctx is None or ctx.manual:
        return True
    sizes = zip(("batch", "seq", "embed", VOCAB), (*hidden.shape[:2], *head.shape), strict=True)
    return all((dim in ctx.rules.table or dim in ACTIVATION_DIMS) and n % ctx.shards(dim) == 0 for dim, n in sizes)


def _check(hidden: Any, head: Any, labels: Any, chunk: Any, cap: float | None) -> None:
    shapes = jnp.shape(hidden), jnp.shape(head), jnp.shape(labels)
    if len(shapes[1]) != 2 or not shapes[2] or shapes[0] != (*shapes[2], shapes[1][0]):
        what = f"hidden {shapes[0]}, head {shapes[1]}, labels {shapes[2]}"
        raise ValueError(f"{what}: has to be [..., embed], [embed, vocab] and [...]; of an embedding pass embedding.T")
    if chunk not in ("auto", "none") and (type(chunk) is not int or chunk < 1):
        raise ValueError(f"chunk={chunk!r}: has to be auto, none, or a number of tokens")
    if cap is not None and not cap > 0:
        raise ValueError(f"cap={cap}: has to be positive; None for no cap")
