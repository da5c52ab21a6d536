"""What one device knows of itself inside the manual lowering.

JAX types every value in a `shard_map` with the axes over which it *varies*: differs from device to device.
This file is the only one that touches that type.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Axes = tuple[str, ...]


def varies_over(x: jax.Array) -> frozenset[str]:
    """The mesh axes over which the value may differ from device to device."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)  # pyright: ignore[reportAttributeAccessIssue]


def varying(x: jax.Array, axes: Axes) -> jax.Array:
    """`x`, typed as varying over `axes` too. The values do not change.

    The transpose is a sum over those axes: a value that several devices used gets the gradients of all.

    Communication: none forward; backward an all-reduce of x over the axes that are new.
    """
    new = tuple(a for a in axes if a not in varies_over(x))
    return lax.pcast(x, new, to="varying") if new else x


def varying_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x`, typed as varying wherever `like` is: what a loop's carry needs at its start."""
    return varying(x, tuple(sorted(varies_over(like))))


def zeros_of(like: Any, *leading: int) -> jax.Array:
    """Zeros [*leading, *shape] of the type of `like`, an array or an abstract value: room for so many of it."""
    aval = jax.typeof(like) if isinstance(like, jax.Array) else like
    return varying(jnp.zeros((*leading, *like.shape), like.dtype), tuple(sorted(aval.manual_axis_type.varying)))


def shard(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """This device's equal part of dim `dim` of an array that every device of `axes` holds whole.

    Communication: none.
    """
    if not axes:
        return x
    size = x.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)
