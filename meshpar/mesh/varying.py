"""The axes over which a value may differ from device to device.

JAX types every value in a `shard_map` with the axes over which it *varies*. Only this file uses that type.

This file depends on JAX's internals, which may change in any release: the attribute `manual_axis_type` of types; the
modules `jax.extend.core`, `jax.interpreters.ad` and `jax.interpreters.mlir`, with which it defines two primitives; and
the switch `_check_vma` of `jax._src.config`. One primitive is needed because `jax.lax.pcast` has no cast from varying
to invariant, the other because Pallas refuses to trace a kernel that does not say over which axes its results vary. Run
tests/collectives and tests/unit/test_attention_kernels.py on each supported version of JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.config import _check_vma
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
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
    """`x`, typed as varying over the axes of `like` too; the first carry of a loop needs the type of the last one."""
    return varying(x, tuple(sorted(varies_over(like))))


def varying_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays, each typed as varying over the axes of all; `custom_vjp` needs one type for its operands."""
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


def hidden(x: jax.Array, axes: Axes) -> jax.Array:
    """`x` for a program that knows nothing of `axes`: typed as the same along them, though each device has its own.

    The program must not communicate over `axes`. Its results are typed again by `shown`. Each is the transpose of the
    other, so each device has a gradient of its own too.

    Communication: none.
    """
    old = tuple(a for a in axes if a in varies_over(x))
    return _hidden.bind(x, axes=old, is_shown=False) if old else x


def shown(x: jax.Array, axes: Axes) -> jax.Array:
    """`x`, a result of a program whose arguments were `hidden`, typed as varying over `axes`. Communication: none."""
    new = tuple(a for a in axes if a not in varies_over(x))
    return _hidden.bind(x, axes=new, is_shown=True) if new else x


def hidden_as(x: jax.Array, aval: Any) -> jax.Array:
    """`x`, with the axes `hidden` over which the type of the same value where it was made does not vary."""
    return hidden(x, tuple(sorted(varies_over(x) - aval.manual_axis_type.varying)))


_hidden = Primitive("hidden")
mlir.register_lowering(_hidden, lambda ctx, x, *, axes, is_shown: [x])


@_hidden.def_abstract_eval
def _hidden_type(aval: Any, *, axes: Axes, is_shown: bool) -> Any:
    kind = aval.manual_axis_type
    varying = kind.varying | set(axes) if is_shown else kind.varying - set(axes)
    return aval.update(manual_axis_type=kind.update(varying=varying))


@partial(ad.deflinear2, _hidden)
def _the_other(grad: Any, _: Any, *, axes: Axes, is_shown: bool) -> tuple[jax.Array]:
    return (hidden(grad, axes) if is_shown else shown(grad, axes),)


@partial(ad.deflinear2, _invariant)
def _to_first_device(grad: Any, _: Any, *, axes: Axes) -> tuple[jax.Array]:
    grad = varying(grad, axes)
    return (jnp.where(lax.axis_index(axes) == 0, grad, jnp.zeros_like(grad)),)


def untyped() -> Any:
    """A context in which values have no such types: to trace a program of whole arrays inside a `shard_map`."""
    return _check_vma(False)


def unchecked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that does not type the axes over which its results vary, such as a Pallas kernel of JAX.

    Each result is typed as varying over the axes of all arguments. The function must not communicate: every device
    computes with its own arguments. It cannot be differentiated; use it inside the two functions of a `custom_vjp`.
    """

    def typed(*args: Any) -> Any:
        leaves = varying_alike(*jax.tree.leaves(args))
        plain = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        with _check_vma(False):
            structs = jax.tree.unflatten(jax.tree.structure(args), plain)
            traced, shapes = jax.make_jaxpr(function, return_shape=True)(*structs)
        results = _unchecked.bind(*leaves, jaxpr=traced)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return typed


_unchecked = Primitive("unchecked")
_unchecked.multiple_results = True


@_unchecked.def_abstract_eval
def _unchecked_type(*avals: Any, jaxpr: ClosedJaxpr) -> list[Any]:
    return [out.update(manual_axis_type=avals[0].manual_axis_type) for out in jaxpr.out_avals]


def _lower_unchecked(ctx: Any, *args: Any, jaxpr: ClosedJaxpr) -> Any:
    plain = ctx.replace(avals_in=jaxpr.in_avals, avals_out=jaxpr.out_avals)
    with _check_vma(False):
        return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(plain, *args)


mlir.register_lowering(_unchecked, _lower_unchecked)
