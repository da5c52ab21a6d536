"""The dtypes in which values are summed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def wide_dtype(dtype: Any) -> Any:
    """The dtype of a sum of values of this dtype: float32, or float64 for float64."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def wide(x: jax.Array) -> jax.Array:
    """`x` in float32, or in float64 if it is float64: bfloat16 and float16 are for storing and multiplying.

    >>> wide(jnp.ones(2, jnp.bfloat16)).dtype
    dtype('float32')
    """
    return x.astype(wide_dtype(x.dtype))


def summed_in(x: jax.Array, dtype: Any) -> jax.Array:
    """A gradient in the dtype in which it is summed over microbatches and devices; `wide` if that is None."""
    return wide(x) if dtype is None else x.astype(dtype)


def computed_in(x: jax.Array, dtype: Any) -> jax.Array:
    """A parameter in the dtype of the computation. Integers are codes of quantized kernels, and keep their dtype."""
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
