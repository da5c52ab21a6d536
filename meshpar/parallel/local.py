"""What one device knows of itself inside the manual lowering."""

from __future__ import annotations

import jax
from jax import lax

from meshpar.mesh.varying import Axes, varies_over, varying, varying_like

__all__ = ["Axes", "shard", "varies_over", "varying", "varying_like"]


def shard(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """This device's equal part of dim `dim` of an array that every device of `axes` holds whole.

    Communication: none.
    """
    if not axes:
        return x
    size = x.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)
