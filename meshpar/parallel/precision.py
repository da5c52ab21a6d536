"""The dtypes in which values are stored, computed and summed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.tree import map_with_path


def wide_dtype(dtype: Any) -> Any:
    """The dtype of a sum of values of this dtype: float32, or float64 for float64."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def wide(x: jax.Array) -> jax.Array:
    """`x` in float32, or in float64 if it is float64: bfloat16 and float16 are for storing and multiplying.

    >>> wide(jnp.ones(2, jnp.bfloat16)).dtype
    dtype('float32')
    """
    return x.astype(wide_dtype(x.dtype))


def stored_in(specs: Any, dtype: Any, wide_paths: Collection[str] = ()) -> Any:
    """Tree of `ArraySpec`: floats are stored in a dtype, those at `wide_paths` in `wide_dtype` of it.

    Args:
      wide_paths: parameters that steps change by amounts that bfloat16 would lose, such as a router's bias.
    """
    return map_with_path(lambda path, spec: spec.stored_in(wide_dtype(dtype) if path in wide_paths else dtype), specs)


def summed_in(x: jax.Array, dtype: Any) -> jax.Array:
    """A gradient in the dtype in which it is summed over microbatches and devices; `wide` if that is None."""
    return wide(x) if dtype is None else x.astype(dtype)


def computed_in(x: jax.Array, dtype: Any) -> jax.Array:
    """A parameter in the dtype of the computation. Integers are codes of quantized kernels, and keep their dtype."""
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
