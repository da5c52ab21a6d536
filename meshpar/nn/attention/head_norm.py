"""The norms of queries and keys before rotary positions.

Shapes: B batch, S seq, H heads, h head_dim.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from meshpar.nn.layers import RMSNorm, filled
from meshpar.parallel.precision import wide

QKNorm = bool | Literal["all_heads"]
"""Whether each head of queries and keys is normalized alone, or all heads of a token together."""


class AllHeadsNorm(nnx.Module):
    """`x[.., H, h] -> x / rms(x over H and h) * scale[H, h]`; `dim` is the name of H.

    Numerics: in float32 at least.
    Communication: where heads are sharded, an all-reduce of one number for each token, and another one backward.
    """

    def __init__(self, heads: int, head_dim: int, *, eps: float, dim: str):
        self.scale = filled(1.0, (heads, head_dim), (dim, "head_dim"))
        self.eps = eps

    def __call__(self, x: Float[Array, "B S H h"]) -> Float[Array, "B S H h"]:
        x_wide = wide(x)
        square = jnp.square(x_wide).mean((-2, -1), keepdims=True)
        return (x_wide * jax.lax.rsqrt(square + self.eps)).astype(x.dtype) * self.scale[...]


def head_norm(kind: QKNorm, heads: int, head_dim: int, *, eps: float, dim: str) -> nnx.Module | None:
    """The norm of `heads` heads, which `dim` names; None for no norm."""
    if kind == "all_heads":
        return AllHeadsNorm(heads, head_dim, eps=eps, dim=dim)
    return RMSNorm(head_dim, eps=eps, dim="head_dim") if kind else None
