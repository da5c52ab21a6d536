"""A decoder layer, forward and backward, on local shards.

Queries, keys and values are one matrix product, gate and up projection another. The backward computes norms and the
MLP's activation again, from the reciprocal root mean squares and the two projections.

Shapes: B batch, S seq, R residual_seq, D embed, H heads, h head_dim, M mlp (local shards).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from byhand import attention
from byhand.axes import Axes

EPS = 1e-5
THETA = 10000.0

Weights = dict[str, jax.Array]
"""attn_norm, mlp_norm [D]; qkv [D, 3, H, h]; o [H, h, D]; gate_up [D, 2, M]; down [M, D]."""


class Shared(NamedTuple):
    """What all layers use: cosines and sines [B, 1, S, h / 2], and the masks of the blocks of queries."""

    cos: jax.Array
    sin: jax.Array
    bias: list[jax.Array]


class Saved(NamedTuple):
    """What the backward needs; `attn_in` and `mlp_in` only where the sequence was gathered."""

    x: jax.Array
    attn_in: jax.Array | None
    attn: attention.Saved
    middle: jax.Array
    mlp_in: jax.Array | None
    gate_up: jax.Array


def shared(batch: dict[str, jax.Array], head_dim: int) -> Shared:
    half = head_dim // 2
    angle = batch["positions"][:, None, :, None] * THETA ** (-jnp.arange(half) / half)
    return Shared(jnp.cos(angle), jnp.sin(angle), attention.masks(batch["segments"]))


def forward(axes: Axes, weights: Weights, x: jax.Array, shared: Shared) -> tuple[jax.Array, Saved]:
    """x [B, R, D] -> the same after one layer."""
    w = axes.gather(weights)
    attn_in = axes.enter(norm(x, w["attn_norm"]))
    qkv = jnp.tensordot(attn_in, w["qkv"], 1).transpose(2, 0, 3, 1, 4)
    scale = qkv.shape[-1] ** -0.5
    attn = attention.forward(rotate(qkv[0], shared) * scale, rotate(qkv[1], shared), qkv[2], shared.bias)
    middle = x + axes.exit(jnp.tensordot(attn.out.swapaxes(1, 2), w["o"], 2))
    mlp_in = axes.enter(norm(middle, w["mlp_norm"]))
    gate_up = jnp.tensordot(mlp_in, w["gate_up"], 1)
    y = middle + axes.exit(hidden(gate_up) @ w["down"])
    saved = Saved(x, attn_in, attn, middle, mlp_in, gate_up)
    return y, saved if axes.sequence else saved._replace(attn_in=None, mlp_in=None)


def backward(axes: Axes, weights: Weights, saved: Saved, dy: jax.Array, shared: Shared) -> tuple[jax.Array, Weights]:
    """The gradient of x, and of the weights; the norms' is a partial sum over `tensor` with a sharded sequence."""
    w = axes.gather(weights)
    grads: dict[str, Any] = {}
    mlp_in = norm(saved.middle, w["mlp_norm"]) if saved.mlp_in is None else saved.mlp_in
    dout = axes.enter(dy)
    grads["down"] = product_over_tokens(hidden(saved.gate_up), dout)
    dgate_up = hidden_backward(saved.gate_up, dout @ w["down"].T)
    grads["gate_up"] = product_over_tokens(mlp_in, dgate_up)
    dnormed = axes.exit(jnp.einsum("bscm,dcm->bsd", dgate_up, w["gate_up"]))
    dmiddle, grads["mlp_norm"] = norm_backward(saved.middle, w["mlp_norm"], dnormed)
    dmiddle += dy
    attn_in = norm(saved.x, w["attn_norm"]) if saved.attn_in is None else saved.attn_in
    dout = axes.enter(dmiddle)
    grads["o"] = jnp.einsum("bhsk,bsd->hkd", saved.attn.out, dout)
    dattn = jnp.einsum("bsd,hkd->bhsk", dout, w["o"])
    dq, dk, dv = attention.backward(saved.attn, shared.bias, dattn)
    scale = dq.shape[-1] ** -0.5
    dqkv = jnp.stack([rotate_back(dq, shared) * scale, rotate_back(dk, shared), dv]).transpose(1, 3, 0, 2, 4)
    grads["qkv"] = product_over_tokens(attn_in, dqkv)
    dnormed = axes.exit(jnp.einsum("bschk,dchk->bsd", dqkv, w["qkv"]))
    dx, grads["attn_norm"] = norm_backward(saved.x, w["attn_norm"], dnormed)
    return dx + dmiddle, axes.reduce(grads)


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * _reciprocal_rms(x) * scale


def norm_backward(x: jax.Array, scale: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradients of x and of scale."""
    r = _reciprocal_rms(x)
    normed = x * r
    dnormed = dy * scale
    return r * (dnormed - normed * (dnormed * normed).mean(-1, keepdims=True)), (dy * normed).sum((0, 1))


def _reciprocal_rms(x: jax.Array) -> jax.Array:
    return jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + EPS)


def hidden(gate_up: jax.Array) -> jax.Array:
    """[B, S, 2, M] -> silu(gate) * up."""
    return jax.nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1]


def hidden_backward(gate_up: jax.Array, dhidden: jax.Array) -> jax.Array:
    gate = gate_up[:, :, 0]
    sigmoid = jax.nn.sigmoid(gate)
    dgate = dhidden * gate_up[:, :, 1] * sigmoid * (1 + gate * (1 - sigmoid))
    return jnp.stack([dgate, dhidden * gate * sigmoid], axis=2)


def rotate(x: jax.Array, shared: Shared) -> jax.Array:
    """Rotary positions of [B, H, S, h]."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * shared.cos - second * shared.sin, second * shared.cos + first * shared.sin], axis=-1
    )


def rotate_back(x: jax.Array, shared: Shared) -> jax.Array:
    return rotate(x, shared._replace(sin=-shared.sin))


def product_over_tokens(x: jax.Array, dy: jax.Array) -> jax.Array:
    """x[B, S, in], dy[B, S, out..] -> [in, out..]."""
    return jnp.tensordot(x, dy, ((0, 1), (0, 1)))
