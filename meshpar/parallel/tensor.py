"""Tensor parallelism as in Megatron-LM, with and without its sequence parallelism.

A block enters a region in which a dim (heads, mlp, vocab) is sharded over axes t, and exits it with a partial sum on
each device. With sequence parallelism the residual stream outside of the region is sharded in `residual_seq`:

    enter_region: x[B, S, D] -> x[B, S, D]          or  x[B, S_t, D] -> x[B, S, D]     all-gather
    exit_region: y[B, S, D] {partial over t} -> y  all-reduce  or  y[B, S_t, D]       reduce-scatter

Each is the transpose of the other, so a block sends 8(t-1)/t b s d bytes in both forms, forward and backward
together. On one device and under GSPMD both are the identity.

Source: Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198.
"""

from __future__ import annotations

from itertools import groupby

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from meshpar.parallel.context import constrain, manual_axes
from meshpar.parallel.local import Axes, shard, varying
from meshpar.parallel.precision import wide

SEQ = 1
"""The position of the sequence dim in activations [batch, seq, ...]."""


def enter_region(x: Float[Array, "B R D"], dim: str) -> Float[Array, "B S D"]:
    """Prepares `x` for multiplication by weights whose `dim` is sharded (column parallel).

    Args:
      x: [batch, residual_seq, embed].
      dim: the weights' dim that is sharded within the region.

    Returns:
      [batch, seq, embed], the same on every device of the axes of `dim`.

    Communication: with sequence parallelism an all-gather; otherwise none forward and an all-reduce backward.
    """
    x = whole_seq(x)
    return varying(x, manual_axes(dim)) if manual_axes(dim) else x


def exit_region(y: Float[Array, "B S D"], dim: str) -> Float[Array, "B R D"]:
    """Sums the devices' partial sums over the shards of `dim` (row parallel).

    Args:
      y: [batch, seq, embed], a partial sum on each device of the axes of `dim`.

    Returns:
      [batch, residual_seq, embed].

    Communication: an all-reduce; with sequence parallelism a reduce-scatter.
    """
    seq_axes = manual_axes("residual_seq")
    partial = manual_axes(dim)
    if rest := tuple(a for a in partial if a not in seq_axes):
        y = lax.psum(y, rest)
    # In the order of `enter_region`'s gather, so that each device gets back the part of the sequence that it had.
    for is_partial, group in groupby(seq_axes, partial.__contains__):
        axes = tuple(group)
        # Over an axis that shards the sequence but not `dim`, every device has the full sum already.
        y = lax.psum_scatter(y, axes, scatter_dimension=SEQ, tiled=True) if is_partial else shard(y, axes, SEQ)
    return y


def whole_seq(x: Shaped[Array, "B R *rest"]) -> Shaped[Array, "B S *rest"]:
    """[batch, seq, ...] from the devices' shards of the residual stream; `local_seq` undoes it.

    Communication: with sequence parallelism an all-gather; otherwise none.
    """
    seq_axes = manual_axes("residual_seq")
    return lax.all_gather(x, seq_axes, axis=SEQ, tiled=True) if seq_axes else x


def local_seq(x: Shaped[Array, "B S *rest"]) -> Shaped[Array, "B R *rest"]:
    """The part of [batch, seq, ...] that belongs to this device's shard of the residual stream."""
    return shard(x, manual_axes("residual_seq"), SEQ)


def embed(table: Float[Array, "V D"], tokens: Int[Array, "B S"]) -> Float[Array, "B R D"]:
    """`table[V_t, D], tokens[B, S] -> x[B, S, D]`: looks up rows of a table that is sharded over the vocabulary.

    Each device looks up the tokens in its shard and contributes zeros for the others.

    Args:
      table: [vocab, embed], local shard.
      tokens: int [batch, seq].

    Returns:
      [batch, residual_seq, embed].

    Communication: that of `exit_region`.
    """
    axes = manual_axes("vocab")
    if not axes:
        # GSPMD partitions this gather well only when the table is not sharded in embed.
        return exit_region(constrain(table, "vocab", "embed")[tokens], "vocab")
    local = tokens - lax.axis_index(axes) * table.shape[0]
    in_shard = (local >= 0) & (local < table.shape[0])
    rows = table[jnp.where(in_shard, local, 0)]
    return exit_region(jnp.where(in_shard[..., None], rows, jnp.zeros_like(rows)), "vocab")


def cross_entropy(
    logits: Float[Array, "B S V"],
    targets: Int[Array, "B S"],
    vocab_size: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    axes: Axes | None = None,
) -> Float[Array, "B S"]:
    """`logits[B, S, V_t], targets[B, S] -> nll[B, S]`, with the vocabulary sharded and never gathered.

    Args:
      logits: [batch, seq, vocab], local shard.
      targets: int [batch, seq], each in [0, vocab_size).
      vocab_size: rows of the vocabulary at or beyond it are padding and get no probability.
      label_smoothing: the share of the target's probability that is spread evenly over the whole vocabulary.
      z_loss: weight of `log(sum(exp(logits)))^2`, which keeps the logits from drifting.
      axes: those over which the vocabulary is sharded. Default: those of the rule of `vocab`.

    Returns:
      Negative log-likelihoods in float32 (float64 if the logits are), equal on all devices of the axes.

    Communication: all-reduces of [batch, seq]: one maximum and one of two sums; smoothing and z-loss add none.
    Source: Szegedy et al. 2016, arXiv:1512.00567 (smoothing); Chowdhery et al. 2022, arXiv:2204.02311 (z-loss).
    """
    axes = manual_axes("vocab") if axes is None else axes
    ids = _ids(logits.shape[-1], axes)
    top, shifted = _shifted(wide(logits), ids < vocab_size, axes)
    hit = jnp.where(ids == targets[..., None], shifted, jnp.zeros_like(shifted)).sum(-1)
    if label_smoothing:  # before the sum over devices, so that smoothing communicates nothing
        spread = jnp.where(ids < vocab_size, shifted, jnp.zeros_like(shifted)).sum(-1)
        hit = (1 - label_smoothing) * hit + label_smoothing / vocab_size * spread
    sums = jnp.stack([jnp.exp(shifted).sum(-1), hit])
    total, hit = lax.psum(sums, axes) if axes else sums
    nll = jnp.log(total) - hit
    return nll + z_loss * jnp.square(top + jnp.log(total)) if z_loss else nll


def divergence(
    logits: Float[Array, "B S V"], teacher: Float[Array, "B S V"], vocab_size: int, temperature: float = 1.0
) -> Float[Array, "B S"]:
    """KL divergence of a model's distribution from its teacher's: `logits[B, S, V_t], teacher[B, S, V_t] -> kl[B, S]`.

    Args:
      logits: [batch, seq, vocab], local shard.
      teacher: the teacher's logits, [batch, seq, vocab], local shard. No gradient flows to them.
      vocab_size: rows of the vocabulary at or beyond it are padding and get no probability.
      temperature: both logits are divided by it.

    Communication: all-reduces of [batch, seq]: one of two maxima, one of three sums.
    Source: Hinton et al. 2015, arXiv:1503.02531.
    """
    axes = manual_axes("vocab")
    real = _ids(logits.shape[-1], axes) < vocab_size
    both = jnp.stack([wide(logits), lax.stop_gradient(wide(teacher))]) / temperature
    _, (student, target) = _shifted(both, real, axes)
    difference = jnp.where(real, target - student, jnp.zeros_like(student))
    sums = jnp.stack([jnp.exp(student).sum(-1), jnp.exp(target).sum(-1), (jnp.exp(target) * difference).sum(-1)])
    total, weight, cross = lax.psum(sums, axes) if axes else sums
    return cross / weight - jnp.log(weight) + jnp.log(total)


def _ids(width: int, axes: tuple[str, ...]) -> Int[Array, "V"]:
    """Token ids of this device's shard of the vocabulary."""
    first = lax.axis_index(axes) * width if axes else 0
    return first + jnp.arange(width, dtype=jnp.int32)


def _shifted(
    logits: Float[Array, "*rows V"], real: Bool[Array, "V"], axes: tuple[str, ...]
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows V"]]:
    """The largest logit of the whole vocabulary, and the logits minus it. Logits of padding become -inf."""
    logits = jnp.where(real, logits, -jnp.inf)
    top = lax.stop_gradient(logits.max(-1))
    top = lax.pmax(top, axes) if axes else top
    return top, logits - top[..., None]


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
    is_it = _ids(logits.shape[-1], axes) == ids[:, None]
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
