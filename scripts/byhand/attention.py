"""Causal attention of packed documents, in blocks of queries; the backward computes the scores again.

A block of queries attends only to the keys up to its end, so the scores of later keys are never computed. The forward
stores the logarithm of the softmax's denominator instead of the scores.

Shapes: B batch, H heads, S seq, h head_dim.
Source: Dao 2023, arXiv:2307.08691.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 128


class Saved(NamedTuple):
    """Values for the backward: queries (scaled), keys, values and outputs [B, H, S, h], and log sums [B, H, S]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    out: jax.Array
    log_sum: jax.Array


class Masks(NamedTuple):
    """0 for visible keys and -inf for others, per block of queries or of keys."""

    by_query: list[jax.Array]
    by_key: list[jax.Array]


def masks(segments: jax.Array) -> Masks:
    """The masks of packed documents, int32 [B, S]."""
    index = jnp.arange(segments.shape[1])
    visible = (index[:, None] >= index) & (segments[:, :, None] == segments[:, None, :])
    bias = jnp.where(visible, 0.0, -jnp.inf)[:, None]
    each = blocks(segments.shape[1])
    by_key = [bias[:, :, start:, start:end].swapaxes(2, 3) for start, end in each]
    return Masks([bias[:, :, start:end, :end] for start, end in each], by_key)


def blocks(seq: int) -> list[tuple[int, int]]:
    """(first, end) of each block."""
    return [(start, min(start + BLOCK, seq)) for start in range(0, seq, BLOCK)]


def forward(q: jax.Array, k: jax.Array, v: jax.Array, masks: Masks) -> Saved:
    outs = []
    log_sums = []
    for (start, end), bias in zip(blocks(q.shape[2]), masks.by_query, strict=True):
        scores = jnp.einsum("bhqk,bhsk->bhqs", q[:, :, start:end], k[:, :, :end]) + bias
        top = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        outs.append(jnp.einsum("bhqs,bhsk->bhqk", weights, v[:, :, :end]) / total)
        log_sums.append((top + jnp.log(total))[..., 0])
    return Saved(q, k, v, jnp.concatenate(outs, 2), jnp.concatenate(log_sums, 2))


def backward(saved: Saved, masks: Masks, dout: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q [B, H, h, S], and of k and v [B, H, S, h].

    The scores are computed with keys in front of queries, so that no product contracts the first dim of its left side:
    XLA:CPU would copy that side.
    """
    q, k, v, out, log_sum = saved
    delta = (dout * out).sum(-1)
    k_hS = k.swapaxes(2, 3)
    dq = []
    dk = []
    dv = []
    for (start, end), bias in zip(blocks(q.shape[2]), masks.by_key, strict=True):
        scores = jnp.einsum("bhsk,bhqk->bhsq", k[:, :, start:end], q[:, :, start:]) + bias
        weights = jnp.exp(scores - log_sum[:, :, None, start:])
        dweights = jnp.einsum("bhsk,bhqk->bhsq", v[:, :, start:end], dout[:, :, start:])
        dscores = weights * (dweights - delta[:, :, None, start:])
        dv.append(jnp.einsum("bhsq,bhqk->bhsk", weights, dout[:, :, start:]))
        dk.append(jnp.einsum("bhsq,bhqk->bhsk", dscores, q[:, :, start:]))
        part = jnp.einsum("bhks,bhsq->bhkq", k_hS[..., start:end], dscores)
        dq.append(jnp.pad(part, ((0, 0), (0, 0), (0, 0), (start, 0))))
    return sum(dq[1:], dq[0]), jnp.concatenate(dk, 2), jnp.concatenate(dv, 2)
