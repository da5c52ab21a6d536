"""Selections from logits whose vocabulary may be sharded.

Shapes: B batch, V vocab, K tokens that are selected.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meshpar.parallel.context import manual_axes
from meshpar.train.token_loss import ids_of_shard


def top(logits: Float[Array, "B V"], num: int) -> Float[Array, "B K"]:
    """`logits[B, V_t] -> best[B, K]`: the `num` largest logits of each row (all, if there are fewer), largest first.

    Communication: an all-gather of the `num` largest of each shard.
    """
    best = lax.top_k(logits, min(num, logits.shape[-1]))[0]
    if not (axes := manual_axes("vocab")):
        return best
    best = lax.all_gather(best, axes, axis=1, tiled=True)
    return lax.top_k(best, min(num, best.shape[-1]))[0]


def top_ids(logits: Float[Array, "B V"], num: int) -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
    """As `top`, and the indices of these logits.

    Communication: two all-gathers of the `num` largest of each shard, and two all-reduces of the result, by which its
      type says that it is the same on every device.
    """
    axes = manual_axes("vocab")
    best, ids = lax.top_k(logits, min(num, logits.shape[-1]))
    ids = ids.astype(jnp.int32)
    if not axes:
        return best, ids
    ids += lax.axis_index(axes) * logits.shape[-1]
    best, ids = (lax.all_gather(x, axes, axis=1, tiled=True) for x in (best, ids))
    best, places = lax.top_k(best, min(num, best.shape[-1]))
    return lax.pmax(best, axes), lax.pmax(jnp.take_along_axis(ids, places, axis=1), axes)


def log_total(logits: Float[Array, "B V"]) -> Float[Array, "B"]:
    """`logits[B, V_t] -> [B]`: the logarithm of the sum of their exponentials, over the whole vocabulary.

    Communication: two all-reduces of [batch].
    """
    axes = manual_axes("vocab")
    largest = logits.max(-1)
    largest = lax.pmax(largest, axes) if axes else largest
    total = jnp.exp(logits - largest[:, None]).sum(-1)
    return largest + jnp.log(lax.psum(total, axes) if axes else total)


def logit_of(logits: Float[Array, "B V"], ids: Int[Array, "B"]) -> Float[Array, "B"]:
    """`logits[B, V_t], ids[B] -> [B]`: the logit of an id of each row.

    Communication: an all-reduce of [batch].
    """
    axes = manual_axes("vocab")
    is_it = ids_of_shard(logits.shape[-1], axes) == ids[:, None]
    found = jnp.where(is_it, logits, 0).sum(-1)
    return lax.psum(found, axes) if axes else found


def argmax(logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    """`logits[B, V_t] -> id[B]`: the index of the largest logit of each row, the first of equals; on every device.

    Communication: two all-reduces of [batch].
    """
    axes = manual_axes("vocab")
    if not axes:
        return logits.argmax(-1).astype(jnp.int32)
    best = logits.max(-1)
    index = lax.axis_index(axes) * logits.shape[-1] + logits.argmax(-1).astype(jnp.int32)
    nobody = jnp.full_like(index, jnp.iinfo(jnp.int32).max)
    return lax.pmin(jnp.where(best == lax.pmax(best, axes), index, nobody), axes)
