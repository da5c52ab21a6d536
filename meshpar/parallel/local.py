"""Helpers for code that runs on local shards, inside the manual lowering."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.mesh.varying import Axes, varying


def zeros_of(like: Any, *leading: int) -> jax.Array:
    """Zeros [*leading, *shape] with the dtype and varying axes of `like`, an array or an abstract value."""
    aval = jax.typeof(like) if isinstance(like, jax.Array) else like
    return varying(jnp.zeros((*leading, *like.shape), like.dtype), tuple(sorted(aval.manual_axis_type.varying)))


def shard(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """This device's equal part, along `dim`, of an array that is replicated over `axes`.

    Communication: none.
    """
    if not axes:
        return x
    size = x.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)
