"""The codec of 8 bits and fewer: an array is `codes * scale`. A block, a row, a channel or a group shares a scale.

Compressed reductions, products in 8 bits, kernels that are stored as codes and caches of keys and values all use it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def largest_code(dtype: Any) -> float:
    """The largest magnitude of a code: 127 for int8, 448 for e4m3, 57344 for e5m2."""
    return float(jnp.finfo(dtype).max) if jnp.issubdtype(dtype, jnp.floating) else 127


def encode(
    x: jax.Array, scale: jax.Array, dtype: Any = jnp.int8, *, largest: float = 0, key: jax.Array | None = None
) -> jax.Array:
    """The codes for which `codes * scale` is nearest to x; 0 where a scale is 0.

    Args:
      x: floats.
      scale: like x, or with dims of size 1. One that is not finite makes every element that is decoded with it not
        finite.
      dtype: int8, or a float of 8 bits.
      largest: the largest magnitude of a code. Default: that of the dtype.
      key: rounds up or down at random, so that the mean is x; for int8 and e4m3.
    """
    steps = x / jnp.where(scale > 0, scale, jnp.ones_like(scale))
    is_float = jnp.issubdtype(dtype, jnp.floating)
    if key is None:
        steps = steps if is_float else jnp.round(steps)
    elif is_float:
        steps = _e4m3_at_random(steps, key)
    else:
        steps = jnp.floor(steps + jax.random.uniform(key, x.shape, x.dtype))
    largest = largest or largest_code(dtype)
    return jnp.clip(steps, -largest, largest).astype(dtype)


def decode(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """The array, in the dtype of the scale."""
    return codes.astype(scale.dtype) * scale


def _e4m3_at_random(x: jax.Array, key: jax.Array) -> jax.Array:
    """Rounds to 3 bits of mantissa: adds a random number below the last of them, and truncates the rest."""
    below = jnp.uint32((1 << 20) - 1)
    bits = lax.bitcast_convert_type(x, jnp.uint32) + (jax.random.bits(key, x.shape, jnp.uint32) & below)
    return lax.bitcast_convert_type(bits & ~below, jnp.float32)
