"""The axes over which a value may differ from device to device.

JAX types every value in a `shard_map` with the axes over which it *varies*. Only this file uses that type.

This file depends on JAX's internals, which may change in any release: the attribute `manual_axis_type` of types, and
the modules `jax.extend.core`, `jax.interpreters.ad` and `jax.interpreters.mlir`, with which it defines a primitive. The
primitive is needed because `jax.lax.pcast` has no cast from varying to invariant. Run tests/collectives on each
supported version of JAX.
"""

from __future__ import annotations

from functools import partial
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

    The transpose is a sum over those axes, because each device's use of the value contributes to its gradient.

    Communication: none forward; backward an all-reduce of x over the new axes.
    """
    new = tuple(a for a in axes if a not in varies_over(x))
    return lax.pcast(x, new, to="varying") if new else x


def varying_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x`, typed as varying over the axes of `like` too, as the initial carry of a loop has to be."""
    return varying(x, tuple(sorted(varies_over(like))))


def varying_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays, each typed as varying over the axes of all of them, as the operands of a `custom_vjp` have to be."""
    axes = tuple(sorted(frozenset().union(*map(varies_over, arrays))))
    return tuple(varying(x, axes) for x in arrays)


def invariant(x: jax.Array, axes: Axes) -> jax.Array:
    """`x`, typed as the same on all devices of `axes`. JAX cannot check this; the caller must ensure it.

    The transpose treats x as the first device's: that device gets the gradient, the others get zeros.

    Communication: none.
    """
    old = tuple(a for a in axes if a in varies_over(x))
    return _invariant.bind(x, axes=old) if old else x


_invariant = Primitive("invariant")
mlir.register_lowering(_invariant, lambda ctx, x, *, axes: [x])


@_invariant.def_abstract_eval
def _invariant_type(aval: Any, *, axes: Axes) -> Any:
    kind = aval.manual_axis_type
    return aval.update(manual_axis_type=kind.update(varying=kind.varying - set(axes)))


@partial(ad.deflinear2, _invariant)
def _to_first_device(grad: Any, _: Any, *, axes: Axes) -> tuple[jax.Array]:
    grad = varying(grad, axes)
    return (jnp.where(lax.axis_index(axes) == 0, grad, jnp.zeros_like(grad)),)
