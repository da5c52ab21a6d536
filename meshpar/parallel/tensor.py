"""Tensor parallelism in the manner of Megatron-LM, with and without its sequence parallelism.

A block enters a region in which a dim (heads, mlp, vocab) is sharded over axes t, and leaves it with a
partial sum on each device. With sequence parallelism the residual stream outside holds a shard of `norm_seq`:

    enter: x[B, S, D] -> x[B, S, D]          or  x[B, S_t, D] -> x[B, S, D]     all-gather
    leave: y[B, S, D] {partial over t} -> y  all-reduce  or  y[B, S_t, D]       reduce-scatter

Each is the other's transpose, so that a block sends the same 8(t-1)/t b s d bytes, forward and backward
together, in both forms. On one device, and under GSPMD, all of it is the identity.

Source: Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from meshpar.parallel.local import shard, varying
from meshpar.parallel.precision import wide
from meshpar.sharding.constrain import constrain, manual_axes

SEQ = 1
"""The position of the sequence dim in activations [batch, seq, ...]."""


def enter(x: Float[Array, "B R D"], dim: str) -> Float[Array, "B S D"]:
    """`x`, ready to be multiplied by weights whose `dim` is sharded (column parallel).

    Args:
      x: [batch, norm_seq, embed].
      dim: the weights' dim that is sharded within the region.

    Returns:
      [batch, seq, embed], the same on every device of the axes of `dim`.

    Communication: with sequence parallelism an all-gather; without, none forward and an all-reduce backward.
    """
    seq_axes = manual_axes("norm_seq")
    if seq_axes:
        x = lax.all_gather(x, seq_axes, axis=SEQ, tiled=True)
    return varying(x, manual_axes(dim)) if manual_axes(dim) else x


def leave(y: Float[Array, "B S D"], dim: str) -> Float[Array, "B R D"]:
    """The sum over the shards of `dim` of what each device computed (row parallel).

    Args:
      y: [batch, seq, embed], a partial sum on each device of the axes of `dim`.

    Returns:
      [batch, norm_seq, embed].

    Communication: all-reduce; with sequence parallelism a reduce-scatter.
    """
    seq_axes, partial = manual_axes("norm_seq"), manual_axes(dim)
    if rest := tuple(a for a in partial if a not in seq_axes):
        y = lax.psum(y, rest)
    if scattered := tuple(a for a in seq_axes if a in partial):
        y = lax.psum_scatter(y, scattered, scatter_dimension=SEQ, tiled=True)
    # An axis that shards the sequence but not `dim`: every device has the whole sum already.
    return shard(y, tuple(a for a in seq_axes if a not in partial), SEQ)


def local_seq(x: Shaped[Array, "B S *rest"]) -> Shaped[Array, "B R *rest"]:
    """The part of [batch, seq, ...] that belongs to this device's shard of the residual stream."""
    return shard(x, manual_axes("norm_seq"), SEQ)


def embed(table: Float[Array, "V D"], tokens: Int[Array, "B S"]) -> Float[Array, "B R D"]:
    """`table[V_t, D], tokens[B, S] -> x[B, S, D]`: looks up rows of a table whose vocabulary is sharded.

    Each device looks up the tokens that it has, and contributes zeros for the rest.

    Args:
      table: [vocab, embed], local shard.
      tokens: int [batch, seq].

    Returns:
      [batch, norm_seq, embed].

    Communication: that of `leave`.
    """
    axes = manual_axes("vocab")
    if not axes:
        # GSPMD partitions this gather well only when the table is whole in embed.
        return leave(constrain(table, "vocab", "embed")[tokens], "vocab")
    local = tokens - lax.axis_index(axes) * table.shape[0]
    mine = (local >= 0) & (local < table.shape[0])
    rows = table[jnp.where(mine, local, 0)]
    return leave(jnp.where(mine[..., None], rows, jnp.zeros_like(rows)), "vocab")


def cross_entropy(logits: Float[Array, "B S V"], targets: Int[Array, "B S"], vocab_size: int) -> Float[Array, "B S"]:
    """`logits[B, S, V_t], targets[B, S] -> nll[B, S]`, with the vocabulary sharded and never gathered.

    Args:
      logits: [batch, seq, vocab], local shard.
      targets: int [batch, seq], each in [0, vocab_size).
      vocab_size: rows of the vocabulary at or beyond it are padding and get no probability.

    Returns:
      Negative log-likelihoods in float32 (float64 if the logits are), the same on every device of the axes.

    Communication: all-reduces of [batch, seq]: one maximum, one of two sums.
    """
    axes = manual_axes("vocab")
    logits = wide(logits)
    first = lax.axis_index(axes) * logits.shape[-1] if axes else 0
    ids = first + jnp.arange(logits.shape[-1], dtype=jnp.int32)
    logits = jnp.where(ids < vocab_size, logits, -jnp.inf)
    top = lax.stop_gradient(logits.max(-1))
    top = lax.pmax(top, axes) if axes else top
    shifted = logits - top[..., None]
    hit = jnp.where(ids == targets[..., None], shifted, jnp.zeros_like(shifted)).sum(-1)
    sums = jnp.stack([jnp.exp(shifted).sum(-1), hit])
    total, hit = lax.psum(sums, axes) if axes else sums
    return jnp.log(total) - hit


def top(logits: Float[Array, "B V"], num: int) -> Float[Array, "B K"]:
    """`logits[B, V_t] -> best[B, K]`: the `num` largest of each row, largest first; all, if there are fewer.

    Communication: an all-gather of the `num` largest of each shard.
    """
    best = lax.top_k(logits, min(num, logits.shape[-1]))[0]
    if not (axes := manual_axes("vocab")):
        return best
    best = lax.all_gather(best, axes, axis=1, tiled=True)
    return lax.top_k(best, min(num, best.shape[-1]))[0]


def argmax(logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    """`logits[B, V_t] -> id[B]`: where the largest of each row is, the first of equals; the same on every device.

    Communication: two all-reduces of [batch].
    """
    axes = manual_axes("vocab")
    if not axes:
        return logits.argmax(-1).astype(jnp.int32)
    best = logits.max(-1)
    index = lax.axis_index(axes) * logits.shape[-1] + logits.argmax(-1).astype(jnp.int32)
    nobody = jnp.full_like(index, jnp.iinfo(jnp.int32).max)
    return lax.pmin(jnp.where(best == lax.pmax(best, axes), index, nobody), axes)
