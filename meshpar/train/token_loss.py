"""Losses of single tokens from logits whose vocabulary may be sharded.

Shapes: B batch, S seq, V vocab.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from meshpar.mesh.varying import Axes
from meshpar.parallel.context import manual_axes
from meshpar.parallel.precision import wide


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
    ids = ids_of_shard(logits.shape[-1], axes)
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
    real = ids_of_shard(logits.shape[-1], axes) < vocab_size
    both = jnp.stack([wide(logits), lax.stop_gradient(wide(teacher))]) / temperature
    _, (student, target) = _shifted(both, real, axes)
    difference = jnp.where(real, target - student, jnp.zeros_like(student))
    sums = jnp.stack([jnp.exp(student).sum(-1), jnp.exp(target).sum(-1), (jnp.exp(target) * difference).sum(-1)])
    total, weight, cross = lax.psum(sums, axes) if axes else sums
    return cross / weight - jnp.log(weight) + jnp.log(total)


def ids_of_shard(width: int, axes: tuple[str, ...]) -> Int[Array, "V"]:
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
