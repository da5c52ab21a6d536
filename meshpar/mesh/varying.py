"""Over which axes a value may differ from device to device.

JAX types every value in a `shard_map` with the axes over which it *varies*. This file is the only one that touches that
type.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

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


def varying_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays, each typed as varying wherever any of them is: what a `custom_vjp` needs of its operands."""
    axes = tuple(sorted(frozenset().union(*map(varies_over, arrays))))
    return tuple(varying(x, axes) for x in arrays)


def invariant(x: jax.Array, axes: Axes) -> jax.Array:
    """`x`, which is the same on all devices of `axes`, typed so. JAX cannot check that it is: the caller knows.

    It is the first device's, as far as its transpose is concerned: that hands the gradient to the first, and zeros to
    the others.

    Communication: none.
    """
    old = tuple(a for a in axes if a in varies_over(x))
    return _invariant.bind(x, axes=old) if old else x


def _typed(aval: Any, *, axes: Axes) -> Any:
    kind = aval.manual_axis_type
    return aval.update(manual_axis_type=kind.update(varying=kind.varying - set(axes)))


def _only_first(grad: Any, _: Any, *, axes: Axes) -> tuple[jax.Array]:
    grad = varying(grad, axes)
    return (jnp.where(lax.axis_index(axes) == 0, grad, jnp.zeros_like(grad)),)


_invariant = Primitive("invariant")
_invariant.def_abstract_eval(_typed)
mlir.register_lowering(_invariant, lambda ctx, x, *, axes: [x])
ad.deflinear2(_invariant, _only_first)
