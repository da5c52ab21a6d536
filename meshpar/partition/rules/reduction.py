"""Reductions over dims, windows, and operations along a dim that need it whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.mesh.varying import Axes
from meshpar.partition.plan import Scope
from meshpar.partition.rules.rule import Rule, bind, dims, same, signed
from meshpar.partition.signature import Call, Signature


def reduce_sum(eqn: Any) -> Signature:
    """A sum over a sharded dim is a partial sum."""
    axes = eqn.params["axes"]
    labels = dims(eqn.invars[0].aval)
    out = tuple(label for label in labels if label not in axes)
    return Signature((labels,), (out,), same(eqn), summed=axes, linear="one")


def extreme(eqn: Any) -> Signature:
    """The maximum or minimum over a sharded dim is that of the devices' own."""
    axes = eqn.params["axes"]
    labels = dims(eqn.invars[0].aval)
    out = tuple(label for label in labels if label not in axes)
    over_devices = lax.pmax if eqn.primitive.name == "reduce_max" else lax.pmin

    def compute(call: Call, x: jax.Array) -> list[jax.Array]:
        shared = call.axes(*axes)
        return [_extreme(x, axes, shared, partial(bind, eqn), over_devices)] if shared else bind(eqn, x)

    return Signature((labels,), (out,), compute, closed=axes)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3, 4))
def _extreme(x: jax.Array, dims: tuple[int, ...], axes: Axes, own: Callable[..., Any], over: Any) -> jax.Array:
    return over(own(x)[0], axes)


@_extreme.defjvp
def _extreme_jvp(dims: Any, axes: Axes, own: Any, over: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """As JAX differentiates a maximum: the mean of the tangents of all elements that are equal to it."""
    (x,), (dx,) = primals, tangents
    result = _extreme(x, dims, axes, own, over)
    is_extreme = (x == jnp.expand_dims(result, dims)).astype(dx.dtype)
    count = lax.psum(is_extreme.sum(dims), axes)
    return result, lax.psum((is_extreme * dx).sum(dims), axes) / count


def over_vmapped(reduce: Callable[..., jax.Array], signature: Callable[[Any], Signature]) -> Rule:
    """A collective over the axis that a `vmap` names: JAX leaves it as a reduction of that dim, by the dim's number.

    Args:
      reduce: the same reduction as a function, whose trace has the parameters that this version of JAX gives it.
    """

    def rule(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
        axes = eqn.params["axes"]
        if eqn.params["axis_index_groups"] or not all(isinstance(axis, int) for axis in axes):
            raise scope.unknown(eqn)
        (traced,) = jax.make_jaxpr(partial(reduce, axes=axes))(eqn.invars[0].aval).eqns
        reduced = eqn.replace(primitive=traced.primitive, params=traced.params)
        return scope.operation(eqn, signature(reduced), nodes)

    return rule


def logical(eqn: Any) -> Signature:
    """Whether any, or all, over a sharded dim."""
    axes = eqn.params["axes"]
    labels = dims(eqn.invars[0].aval)
    out = tuple(label for label in labels if label not in axes)
    over_devices = lax.pmax if eqn.primitive.name == "reduce_or" else lax.pmin

    def compute(call: Call, x: jax.Array) -> list[jax.Array]:
        (own,) = bind(eqn, x)
        shared = call.axes(*axes)
        return [over_devices(own.astype(jnp.int32), shared).astype(own.dtype)] if shared else [own]

    return Signature((labels,), (out,), compute, closed=axes)


def by_function(eqn: Any) -> Signature:
    """`lax.reduce` of several arrays by a function, each with its initial value: the dims have to be whole."""
    num, axes = len(eqn.outvars), eqn.params["dimensions"]
    labels = dims(eqn.invars[0].aval, *axes)
    out = tuple(label for i, label in enumerate(labels) if i not in axes)
    return Signature((labels,) * num + ((),) * num, (out,) * num, same(eqn))


def over_whole(eqn: Any) -> Signature:
    """A reduction whose dims have to be whole: an index, a product."""
    axes = eqn.params["axes"]
    labels = dims(eqn.invars[0].aval, *axes)
    out = tuple(label for i, label in enumerate(labels) if i not in axes)
    return Signature((labels,), (out,), same(eqn))


def along(key: str) -> Callable[[Any], Signature]:
    """An operation along one dim, such as a sort: that dim is whole, and all arrays have the same shape."""

    def signature(eqn: Any) -> Signature:
        dim = eqn.params[key] % eqn.invars[0].aval.ndim
        labels = dims(eqn.invars[0].aval, dim)
        return Signature((labels,) * len(eqn.invars), (labels,) * len(eqn.outvars), same(eqn))

    return signature


def along_last(eqn: Any) -> Signature:
    """An operation along the last dim, such as the largest k."""
    dim = eqn.invars[0].aval.ndim - 1
    labels = dims(eqn.invars[0].aval, dim)
    return Signature((labels,), (labels,) * len(eqn.outvars), same(eqn))


def window(eqn: Any) -> Signature:
    """A reduction in windows: dims over which no window slides may be sharded."""
    params = eqn.params
    sizes = params["window_dimensions"]
    strides = params["window_strides"]
    slides = [i for i, size in enumerate(sizes) if size != 1 or strides[i] != 1]
    slides += [i for i, pad in enumerate(params.get("padding", ())) if tuple(pad) != (0, 0)]
    slides += [i for i, dilation in enumerate(params.get("base_dilation", ())) if dilation != 1]
    labels = dims(eqn.outvars[0].aval, *slides)
    ins = tuple(labels if v.aval.ndim else () for v in eqn.invars)
    return Signature(ins, (labels,) * len(eqn.outvars), same(eqn))


RULES: dict[str, Rule] = {
    "reduce_sum": signed(reduce_sum),
    **dict.fromkeys(("reduce_max", "reduce_min"), signed(extreme)),
    "reduce": signed(by_function),
    "psum": over_vmapped(lax.reduce_sum, reduce_sum),
    "pmax": over_vmapped(lax.reduce_max, extreme),
    "pmin": over_vmapped(lax.reduce_min, extreme),
    **dict.fromkeys(("reduce_or", "reduce_and"), signed(logical)),
    **dict.fromkeys(("argmax", "argmin", "reduce_prod", "reduce_xor"), signed(over_whole)),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), signed(along("axis"))),
    "sort": signed(along("dimension")),
    **dict.fromkeys(("top_k", "approx_top_k"), signed(along_last)),
    **dict.fromkeys(
        (
            "reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_scatter_add",
            "select_and_gather_add",
        ),
        signed(window),
    ),
}  # fmt: skip
