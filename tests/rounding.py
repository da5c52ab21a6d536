"""A planted fault: 8-bit numbers without scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def unscaled(quantize: Callable[..., Any]) -> Callable[..., Any]:
    """`quantized._quantize` with a scale of one: arrays are cast as they are."""

    def cast(x: jax.Array, dtype: Any, top: jax.Array) -> Any:
        largest = 127 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
        return quantize(x, dtype, jnp.full_like(top, largest))

    return cast
