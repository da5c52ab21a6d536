"""The dtypes in which values are stored, computed and summed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.tree import map_with_path


def wide_dtype(dtype: Any) -> Any:
    """The dtype of a sum of values of this dtype: float32, or float64 for float64; and complex for complex numbers."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.dtype(dtype)
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


def sum_dtype(dtype: Any, declared: Any) -> Any:
    """The dtype in which gradients of this dtype are summed: as declared, or `wide_dtype` if that is None.

    Complex numbers are summed as they are, or in 128 bits if float64 is declared.
    """
    if declared is None or jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.dtype(jnp.complex128) if declared == jnp.float64 else wide_dtype(dtype)
    return jnp.dtype(declared)


def summed_in(x: jax.Array, dtype: Any) -> jax.Array:
    """A gradient in the dtype in which it is summed over microbatches and devices; `wide` if that is None."""
    return x.astype(sum_dtype(x.dtype, dtype))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mixed:
    """A parameter whose gradient is summed in another dtype than the parameter is stored in.

    JAX gives a gradient the dtype of its argument. So the argument is `zeros`, in the dtype of the sum: the function
    that uses the parameter passes its gradient there. Nothing reads the zeros, so no program holds them.
    """

    stored: jax.Array
    zeros: jax.Array

    def __getitem__(self, index: Any) -> Mixed:
        """As `nnx.Param` has it: `param[...]`."""
        return Mixed(self.stored[index], self.zeros[index])


def is_mixed(x: Any) -> bool:
    return isinstance(x, Mixed)


def variables(params: Any) -> Any:
    """The arrays with respect to which a loss is differentiated: the zeros of each `Mixed`, else the parameter."""
    return jax.tree.map(lambda x: x.zeros if is_mixed(x) else x, params, is_leaf=is_mixed)


def with_variables(params: Any, variables: Any) -> Any:
    """The parameters as a function of `variables(params)`."""

    def one(x: Any, variable: jax.Array) -> Any:
        return Mixed(x.stored, variable) if is_mixed(x) else variable

    return jax.tree.map(one, params, variables, is_leaf=is_mixed)


def computed_in(x: jax.Array, dtype: Any) -> jax.Array:
    """A parameter in the dtype of the computation. Integers are codes of quantized kernels, and keep their dtype."""
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
