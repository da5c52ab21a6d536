"""A product of matrices whose backward is fast on CPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

MANY_TOKENS = 1024
"""With at least this many tokens, the gradient of a weight is computed as a product of matrices; see `_by_token`."""


@jax.custom_vjp
def matmul(x: jax.Array, *kernels: jax.Array) -> jax.Array:
    """`x[..., K] @ w[K, N] -> y[..., N]`, where w is the concatenation of several kernels [K, N_i].

    The backward transposes the smaller of x and dy for the gradient of w. It concatenates the kernels again, so that
    remat and ZeRO-3 need not store w.
    """
    return lax.dot_general(x, jnp.concatenate(kernels, axis=1), (((x.ndim - 1,), (0,)), ((), ())))


def _matmul_backward(saved: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array, ...]:
    x, *kernels = saved
    w_KN = jnp.concatenate(kernels, axis=1)
    dx = lax.dot_general(dy, w_KN, (((dy.ndim - 1,), (1,)), ((), ())))
    x = _by_token(x)
    dy = _by_token(dy)
    tokens = tuple(range(x.ndim - 1))
    over_tokens = ((tokens, tokens), ((), ()))
    if w_KN.shape[0] <= w_KN.shape[1]:
        dw_KN = lax.dot_general(x, dy, over_tokens)
    else:
        dw_KN = lax.dot_general(dy, x, over_tokens).T
    return dx, *cut(dw_KN, kernels)


matmul.defvjp(lambda x, *kernels: (matmul(x, *kernels), (x, *kernels)), _matmul_backward)


def _by_token(x: jax.Array) -> jax.Array:
    """[tokens, N] where there are many tokens.

    XLA:CPU copies the transpose of a left operand of three dims. That takes up to a fifth of the product's time for
    2048 tokens, and half or more for 4096. It does not copy an operand of two dims, but that product is 3 % slower for
    512 tokens.
    """
    return x.reshape(-1, x.shape[-1]) if math.prod(x.shape[:-1]) >= MANY_TOKENS else x


def cut(joint: jax.Array, kernels: Sequence[jax.Array]) -> list[jax.Array]:
    """Cuts the last dim into parts as wide as each kernel."""
    ends = np.cumsum([kernel.shape[1] for kernel in kernels])
    return jnp.split(joint, ends[:-1], axis=-1)
