"""`ArraySpec` describes an array independently of any mesh: its shape, its dtype, and a name for each dim."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.errors import ShardingError


@dataclass(frozen=True)
class ArraySpec:
    """One array of a model, without its sharding.

    Args:
      shape: the global shape.
      dtype: any NumPy or ml_dtypes dtype.
      dims: one name for each dim.

    Raises:
      ShardingError: the numbers of dims and names differ.

    Examples:
      >>> print(ArraySpec((512, 8, 64), np.dtype("float32"), ("embed", "heads", "head_dim")))
      float32[512, 8, 64]  (embed, heads, head_dim)
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    dims: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.dims):
            raise ShardingError(f"{len(self.shape)} dims {self.shape}, but {len(self.dims)} names {self.dims}")

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Its shape and dtype."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        return self.size * self.dtype.itemsize

    def stored_in(self, dtype: np.dtype) -> Self:
        """The same array in the dtype in which a run stores floats. Integers are codes, and keep their dtype."""
        return replace(self, dtype=dtype) if jnp.issubdtype(self.dtype, jnp.floating) else self

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]  ({', '.join(self.dims)})"
