"""A decoder layer, forward and backward, on local shards.

Queries, keys and values are one matrix product, gate and up projection another. The backward computes the MLP's
activation again, from the two projections.

Shapes: B batch, S seq, R residual_seq, D embed, H heads, h head_dim, M mlp (local shards).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from byhand import attention, experts
from byhand.axes import Axes
from byhand.experts import hidden, hidden_backward

EPS = 1e-5
THETA = 10000.0

Weights = dict[str, jax.Array]
"""attn_norm, mlp_norm [D]; qkv [D, 3 H h]; o [D, H h]; gate_up [D, 2 M]; down [D, M]. With experts these two are [E, D,
...], and there is router [D, experts].

D is the first dim of all. XLA:CPU copies a transposed left operand of a product, but not a transposed right one; with D
first, each weight gradient transposes its smaller operand.
"""


class Shared(NamedTuple):
    """Values for all layers: cosines and signed sines [B, 1, S, 2, h / 2], and the masks of the blocks of queries."""

    cos: jax.Array
    sin: jax.Array
    masks: attention.Masks


class Saved(NamedTuple):
    """Values for the backward, which computes the norms again.

    Args:
      gathered: the results of both norms, if they were gathered.
      mlp: the MLP's two projections, or the values for the backward of its experts.
    """

    x: jax.Array
    attn: attention.Saved
    middle: jax.Array
    gathered: tuple[jax.Array, ...]
    mlp: Any


def shared(batch: dict[str, jax.Array], head_dim: int) -> Shared:
    half = head_dim // 2
    angle = batch["positions"][:, None, :, None] * THETA ** (-jnp.arange(half) / half)
    sin = jnp.sin(angle)
    cos = jnp.cos(angle)
    return Shared(jnp.stack([cos, cos], 3), jnp.stack([-sin, sin], 3), attention.masks(batch["segments"]))


def forward(axes: Axes, weights: Weights, x: jax.Array, shared: Shared) -> tuple[jax.Array, Saved]:
    """x [B, R, D] -> the same after one layer."""
    w = axes.gather(weights)
    attn_in = axes.enter(norm(x, w["attn_norm"]))
    q, k, v = split_heads(attn_in @ w["qkv"], shared)
    attn = attention.forward(rotate(q, shared) * q.shape[-1] ** -0.5, rotate(k, shared), v, shared.masks)
    middle = x + axes.exit(join_heads(attn.out) @ w["o"].T)
    mlp_in = axes.enter(norm(middle, w["mlp_norm"]))
    if axes.per_token:
        y, mlp = experts.forward(axes, w, mlp_in, axes.per_token)
    else:
        mlp = mlp_in @ w["gate_up"]
        y = axes.exit(hidden(mlp) @ w["down"].T)
    return middle + y, Saved(x, attn, middle, (attn_in, mlp_in) if axes.sequence else (), mlp)


def backward(axes: Axes, weights: Weights, saved: Saved, dy: jax.Array, shared: Shared) -> tuple[jax.Array, Weights]:
    """The gradient of x, and of the weights; the norms' is a partial sum over `tensor` with a sharded sequence."""
    w = axes.gather_again(weights, dy)
    # Otherwise XLA:CPU computes and transposes in the forward what only the backward needs.
    saved, dy = lax.optimization_barrier((saved, dy))
    grads: dict[str, Any] = {}
    if axes.per_token:
        dnormed, of_experts = experts.backward(axes, w, saved.mlp, dy)
        grads |= of_experts
    else:
        dout = axes.enter(dy)
        grads["down"] = product_over_tokens(dout, hidden(saved.mlp))
        dgate_up = hidden_backward(saved.mlp, dout @ w["down"])
        mlp_in = saved.gathered[1] if axes.sequence else norm(saved.middle, w["mlp_norm"])
        grads["gate_up"] = product_over_tokens(mlp_in, dgate_up)
        dnormed = axes.exit(dgate_up @ w["gate_up"].T)
    dmiddle, grads["mlp_norm"] = norm_backward(saved.middle, w["mlp_norm"], dnormed)
    dmiddle += dy
    attn, dmiddle = lax.optimization_barrier((saved.attn, dmiddle))  # else it computes weights before the MLP
    dout = axes.enter(dmiddle)
    grads["o"] = product_over_tokens(dout, join_heads(attn.out))
    dattn = (dout @ w["o"]).reshape(*dout.shape[:2], -1, attn.q.shape[-1]).swapaxes(1, 2)
    dq, dk, dv = attention.backward(attn, shared.masks, dattn)
    dq = rotate_back(dq.swapaxes(2, 3), shared) * dk.shape[-1] ** -0.5
    dqkv = jnp.concatenate([join_heads(dq), join_heads(rotate_back(dk, shared)), join_heads(dv)], -1)
    attn_in = saved.gathered[0] if axes.sequence else norm(saved.x, w["attn_norm"])
    grads["qkv"] = product_over_tokens(attn_in, dqkv)
    dnormed = axes.exit(dqkv @ w["qkv"].T)
    dx, grads["attn_norm"] = norm_backward(saved.x, w["attn_norm"], dnormed)
    return dx + dmiddle, axes.reduce(grads)


def split_heads(qkv: jax.Array, shared: Shared) -> list[jax.Array]:
    """[B, S, 3 H h] -> three of [B, H, S, h]."""
    head_dim = 2 * shared.cos.shape[-1]
    parts = jnp.split(qkv, 3, axis=-1)
    return [x.reshape(*x.shape[:2], -1, head_dim).swapaxes(1, 2) for x in parts]


def join_heads(x: jax.Array) -> jax.Array:
    """[B, H, S, h] -> [B, S, H h]."""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


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


def rotate(x: jax.Array, shared: Shared) -> jax.Array:
    """Rotary positions of [B, H, S, h], whose pairs are (i, i + h / 2)."""
    pairs = x.reshape(*x.shape[:3], 2, -1)
    return (pairs * shared.cos + pairs[..., ::-1, :] * shared.sin).reshape(x.shape)


def rotate_back(x: jax.Array, shared: Shared) -> jax.Array:
    return rotate(x, shared._replace(sin=-shared.sin))


def product_over_tokens(x: jax.Array, dy: jax.Array) -> jax.Array:
    """x[B, S, in], dy[B, S, out] -> [in, out]."""
    return x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])
