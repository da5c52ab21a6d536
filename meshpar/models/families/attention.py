"""Attention of the families, of whole rows and of one token to a cache.

Shapes: B batch, S seq, T places of a cache, H heads, K kv_heads, G query heads of a key head, h head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshpar.models.families.layers import Linear, Normed, capped
from meshpar.models.families.options import PARTS, Attention
from meshpar.models.families.rotary import Angles, rotated
from meshpar.nn.attention.functional import attend
from meshpar.nn.layers import filled
from meshpar.parallel.precision import wide

Cache = dict[str, jax.Array]


@dataclass(frozen=True)
class Tokens:
    """What attention knows of the tokens besides their vectors.

    Args:
      positions: int32 [B, S], in the document of each token.
      segments: int32 [B, S], its document; None if each row is one.
      end: int32 [B], the number of tokens in the cache; None without one.
      angles: the rotation of each kind of rotary positions, by id.
    """

    positions: jax.Array
    segments: jax.Array | None
    end: jax.Array | None
    angles: dict[Any, Angles]


class SelfAttention(nnx.Module):
    """`x[B, S, embed] -> [B, S, embed]`."""

    def __init__(self, width: int, options: Attention, *, rngs: nnx.Rngs):
        self.options = options
        embed, head = ("embed", width), ("head_dim", options.head_dim)
        heads, kv_heads = ("heads", options.heads), ("kv_heads", options.kv_heads)
        linear = partial(Linear, bias=options.qkv_bias, rngs=rngs)
        is_fused = options.form == "fused"
        parts = (PARTS, options.heads // options.kv_heads + 2)
        self.qkv = linear([embed], [kv_heads, parts, head]) if is_fused else None
        self.q = None if is_fused else linear([embed], [heads, head])
        self.k = None if is_fused else linear([embed], [kv_heads, head])
        self.v = None if is_fused else linear([embed], [kv_heads, head])
        self.o = Linear([heads, head], [embed], bias=options.o_bias, rngs=rngs)
        self.q_norm = self._norm(options, heads)
        self.k_norm = self._norm(options, kv_heads)
        self.sinks = filled(0.0, (options.heads,), ("heads",)) if options.has_sinks else None

    @staticmethod
    def _norm(options: Attention, heads: tuple[str, int]) -> Normed | None:
        if options.qk_norm is None:
            return None
        head = ("head_dim", options.head_dim)
        return Normed(options.qk_norm, head) if options.norm_over == "head" else Normed(options.qk_norm, heads, head)

    def __call__(self, x: jax.Array, tokens: Tokens, cache: Cache | None) -> tuple[jax.Array, Cache | None]:
        options = self.options
        q, k, v = self._projected(x)
        if options.clip is not None:
            q, k, v = (jnp.clip(one, -options.clip, options.clip) for one in (q, k, v))
        if not options.norms_rotated:
            q, k = self._normed(q, k)
        if options.rope is not None:
            q, k = (rotated(options.rope, one, tokens.angles[options.rope]) for one in (q, k))
        if options.norms_rotated:
            q, k = self._normed(q, k)
        if options.position_scale:
            beta, length = options.position_scale
            grown = 1 + beta * jnp.log1p(jnp.floor(tokens.positions / length))
            q = q * grown[..., None, None].astype(q.dtype)
        if cache is not None:
            cache = appended(cache, tokens, k=k, v=v)
            k, v = cache["k"], cache["v"]
        return self.o(self._attended(q, k, v, tokens)), cache

    def _projected(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        if self.qkv is None:
            assert self.q is not None and self.k is not None and self.v is not None
            return self.q(x), self.k(x), self.v(x)
        qkv = self.qkv(x)
        q = qkv[..., :-2, :].reshape(*x.shape[:2], self.options.heads, self.options.head_dim)
        return q, qkv[..., -2, :], qkv[..., -1, :]

    def _normed(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        if self.q_norm is None or self.k_norm is None:
            return q, k
        if self.options.norm_over != "all_heads":
            return self.q_norm(q), self.k_norm(k)
        return _over_all_heads(self.q_norm, q), _over_all_heads(self.k_norm, k)

    def _attended(self, q: jax.Array, k: jax.Array, v: jax.Array, tokens: Tokens) -> jax.Array:
        options = self.options
        if tokens.end is None and self.sinks is None and options.alibi is None:
            return attend(
                q, k, v, window=options.window, segments=tokens.segments, scale=options.scale, cap=options.cap
            )
        allowed, places = visible(tokens, k.shape[1], options.window)
        bias = None
        if options.alibi:
            slopes = _slopes(options.heads, rounded=options.alibi == "scaled")
            bias = slopes[:, None] * places.astype(slopes.dtype)  # [H, T]
            if options.alibi == "scaled":
                bias = bias.astype(jnp.bfloat16).astype(slopes.dtype) * options.scale
        return attended(
            q,
            k,
            v,
            allowed,
            scale=options.scale,
            cap=options.cap,
            bias=bias,
            sinks=None if self.sinks is None else self.sinks[...],
        )

    def empty(self, batch_size: int, length: int, dtype: Any) -> Cache:
        shape = (batch_size, length, self.options.kv_heads, self.options.head_dim)
        return {name: jnp.zeros(shape, dtype) for name in "kv"}


def _over_all_heads(norm: Normed, x: jax.Array) -> jax.Array:
    """The mean square of all heads of a token; `norm` has a scale [heads, head_dim]."""
    y = wide(x)
    y = y * jax.lax.rsqrt(jnp.square(y).mean((-2, -1), keepdims=True) + norm.options.eps)
    assert norm.scale is not None
    return (y * (wide(norm.scale[...]) + norm.options.offset)).astype(x.dtype)


def appended(cache: Cache, tokens: Tokens, **new: jax.Array) -> Cache:
    """The cache with the vectors [B, 1, ...] of one token more, at the place `end` of each row."""
    assert tokens.end is not None
    end = tokens.end

    def placed(old: jax.Array, one: jax.Array) -> jax.Array:
        here = jnp.arange(old.shape[1]) == end[:, None]
        return jnp.where(here.reshape(*here.shape, *(1,) * (old.ndim - 2)), one.astype(old.dtype), old)

    return cache | {name: placed(cache[name], one) for name, one in new.items()}


def visible(tokens: Tokens, num_keys: int, window: int | None) -> tuple[jax.Array, jax.Array]:
    """Which keys a query attends to, bool [B or 1, S, T], and the place of each key, int32 [T]."""
    keys = jnp.arange(num_keys)
    queries = jnp.arange(tokens.positions.shape[1]) if tokens.end is None else tokens.end[:, None]
    behind = jnp.atleast_2d(queries)[..., None] - keys
    allowed = behind >= 0
    if window is not None:
        allowed &= behind < window
    if tokens.segments is not None:
        allowed &= tokens.segments[:, :, None] == tokens.segments[:, None, :]
    return allowed, keys


def attended(
    q: jax.Array, k: jax.Array, v: jax.Array, allowed: jax.Array, *, scale: float, cap: float | None = None,
    bias: jax.Array | None = None, sinks: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Attention by its formula: `softmax(cap(q k scale) + bias) v`, [B, S, H, h]; `bias` is [H, T], `sinks` [H]."""
    kv_heads = k.shape[2]
    grouped = q.reshape(*q.shape[:2], kv_heads, -1, q.shape[-1])
    scores = capped(wide(jnp.einsum("bskgh,btkh->bkgst", grouped, k)) * scale, cap)
    if bias is not None:
        scores = scores + bias.reshape(kv_heads, -1, 1, bias.shape[-1])
    scores = jnp.where(allowed[:, None, None], scores, jnp.finfo(scores.dtype).min)
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        sink = wide(sinks).reshape(kv_heads, -1, 1, 1)
        top = jnp.maximum(top, sink)
    weights = jnp.exp(scores - jax.lax.stop_gradient(top))
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - jax.lax.stop_gradient(top))
    out = jnp.einsum("bkgst,btkh->bskgh", (weights / total).astype(v.dtype), v)
    return out.reshape(*q.shape[:3], v.shape[-1])


def _slopes(heads: int, rounded: bool) -> jax.Array:
    """ALiBi's slope of each head. Source: arXiv:2108.12409."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-(2 ** -(math.log2(power) - 3)) * i) for i in range(1, power + 1)]
    slopes += [2 ** (-(2 ** -(math.log2(2 * power) - 3)) * i) for i in range(1, 2 * (heads - power) + 1, 2)]
    found = jnp.asarray(np.array(slopes), jnp.float32)
    return found.astype(jnp.bfloat16).astype(jnp.float32) if rounded else found
