"""Causal attention of packed documents, in blocks of queries; the backward computes the scores again.

A block of queries attends only to the keys up to its end, so the scores of later keys are never computed. The forward
keeps the logarithm of the softmax's denominator in place of the scores.

Shapes: B batch, H heads, S seq, h head_dim.
Source: Dao 2023, arXiv:2307.08691.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 128


class Saved(NamedTuple):
    """What the backward needs: queries (scaled), keys, values and outputs [B, H, S, h], and log sums [B, H, S, 1]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    out: jax.Array
    log_sum: jax.Array


def masks(segments: jax.Array) -> list[jax.Array]:
    """float32 [B, 1, block, keys] of each block of queries: 0 for visible keys, -inf for the others."""
    index = jnp.arange(segments.shape[1])
    found = []
    for start, end in blocks(segments.shape[1]):
        visible = (index[start:end, None] >= index[:end]) & (segments[:, start:end, None] == segments[:, None, :end])
        found.append(jnp.where(visible, 0.0, -jnp.inf)[:, None])
    return found


def blocks(seq: int) -> list[tuple[int, int]]:
    """(first query, end) of each block."""
    return [(start, min(start + BLOCK, seq)) for start in range(0, seq, BLOCK)]


def forward(q: jax.Array, k: jax.Array, v: jax.Array, bias: list[jax.Array]) -> Saved:
    outs = []
    log_sums = []
    for (start, end), one in zip(blocks(q.shape[2]), bias, strict=True):
        scores = jnp.einsum("bhqk,bhsk->bhqs", q[:, :, start:end], k[:, :, :end]) + one
        top = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        outs.append(jnp.einsum("bhqs,bhsk->bhqk", weights, v[:, :, :end]) / total)
        log_sums.append(top + jnp.log(total))
    return Saved(q, k, v, jnp.concatenate(outs, 2), jnp.concatenate(log_sums, 2))


def backward(saved: Saved, bias: list[jax.Array], dout: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v."""
    q, k, v, out, log_sum = saved
    seq = q.shape[2]
    delta = (dout * out).sum(-1, keepdims=True)
    dqs = []
    dk = []
    dv = []
    for (start, end), one in zip(blocks(seq), bias, strict=True):
        here = slice(start, end)
        scores = jnp.einsum("bhqk,bhsk->bhqs", q[:, :, here], k[:, :, :end]) + one
        weights = jnp.exp(scores - log_sum[:, :, here])
        dweights = jnp.einsum("bhqk,bhsk->bhqs", dout[:, :, here], v[:, :, :end])
        dscores = weights * (dweights - delta[:, :, here])
        dqs.append(jnp.einsum("bhqs,bhsk->bhqk", dscores, k[:, :, :end]))
        dk.append(jnp.einsum("bhqs,bhqk->bhsk", dscores, q[:, :, here]))
        dv.append(jnp.einsum("bhqs,bhqk->bhsk", weights, dout[:, :, here]))
    return jnp.concatenate(dqs, 2), _sum(dk, seq), _sum(dv, seq)


def _sum(parts: list[jax.Array], seq: int) -> jax.Array:
    """The sum of [B, H, keys, h], whose keys are the first of [B, H, seq, h]."""
    return sum(jnp.pad(part, ((0, 0), (0, 0), (0, seq - part.shape[2]), (0, 0))) for part in parts)  # pyright: ignore
