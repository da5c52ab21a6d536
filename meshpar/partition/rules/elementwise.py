"""Operations that compute each element of the result from the same element of the operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.partition.layout import Layout
from meshpar.partition.plan import Deferred, Placed, Scope
from meshpar.partition.rules.rule import Rule, same
from meshpar.partition.signature import Call, Signature, sharded

LINEAR = {
    "add": "all", "sub": "all", "add_any": "all", "mul": "one", "div": "first", "neg": "one", "copy": "one",
    "copy_p": "one", "real": "one", "imag": "one", "name": "one", "convert_element_type": "one",
}  # fmt: skip
OTHERS = [
    "abs",
    "acos",
    "acosh",
    "and",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bessel_i0e",
    "bessel_i1e",
    "bitcast_convert_type",
    "cbrt",
    "ceil",
    "clamp",
    "clz",
    "conj",
    "complex",
    "cos",
    "cosh",
    "digamma",
    "eq",
    "erf",
    "erf_inv",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "ge",
    "gt",
    "igamma",
    "igammac",
    "is_finite",
    "le",
    "lgamma",
    "log",
    "log1p",
    "log2",
    "logistic",
    "lt",
    "max",
    "min",
    "ne",
    "nextafter",
    "not",
    "one_minus_square",
    "or",
    "polygamma",
    "polynomial",
    "population_count",
    "pow",
    "integer_pow",
    "reduce_precision",
    "rem",
    "round",
    "rsqrt",
    "select_n",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "stop_gradient",
    "tan",
    "tanh",
    "xor",
    "zeta",
    "eq_to",
    "le_to",
    "lt_to",
]
SLOPES = {"erf": 2 / math.sqrt(math.pi), "erfc": -2 / math.sqrt(math.pi)}
"""Primitive -> the factor of exp(-x^2) in its derivative."""


def elementwise(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    """An operation whose operands have the shape of its result, or are scalars."""
    signature = signature_of(eqn, nodes)
    aval = eqn.outvars[0].aval
    exists = [node for node in nodes if isinstance(node, Placed) and node.layout.shape == aval.shape]
    if exists or not aval.ndim:
        return scope.operation(eqn, signature, nodes)
    labels = signature.outs[0]
    axes = sharded(labels, scope.assigned(signature, nodes))

    def make(axes: Any) -> Placed:
        return scope.operation(eqn, signature, nodes, dict(zip(labels, axes, strict=True)))[0]

    names = tuple(_name_of(label, signature, nodes) for label in labels)
    return [Deferred(Layout(tuple(aval.shape), aval.dtype, axes, names), make)]


def _name_of(label: Any, signature: Signature, nodes: list[Any]) -> str:
    """The name of a dim: that of the first operand which has one."""
    pairs = ((ins, node.layout.names) for ins, node in zip(signature.ins, nodes, strict=True))
    return next((names[ins.index(label)] for ins, names in pairs if label in ins and names[ins.index(label)]), "")


def signature_of(eqn: Any, nodes: list[Any]) -> Signature:
    shape = eqn.outvars[0].aval.shape
    out = tuple(range(len(shape)))
    # A dim of size 1 is repeated along a larger one.
    ins = tuple(tuple(i if n == shape[i] else None for i, n in enumerate(node.layout.shape)) for node in nodes)
    linear = LINEAR.get(eqn.primitive.name, "no")
    if eqn.primitive.name == "convert_element_type" and not _keeps_sums(eqn):
        linear = "no"
    return Signature(ins, (out,), _compute(eqn), linear=linear, views=len(nodes) == 1)  # pyright: ignore


def _compute(eqn: Any) -> Callable[..., list[jax.Array]]:
    """What the equation does on shards. JAX 0.12 cannot differentiate error functions there.

    It writes their derivative with `lax.polynomial`, whose coefficients it does not cast to the type of the shards.
    """
    name = eqn.primitive.name
    return partial(_error_function, name) if name in SLOPES else same(eqn)


def _error_function(name: str, call: Call, x: jax.Array) -> list[jax.Array]:
    return [_with_slope(name, x)]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_slope(name: str, x: jax.Array) -> jax.Array:
    return getattr(lax, name)(x)


@_with_slope.defjvp
def _with_slope_jvp(name: str, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    return _with_slope(name, x), SLOPES[name] * (dx * jnp.exp(-jnp.square(x)))


def _keeps_sums(eqn: Any) -> bool:
    """Whether a cast rounds no more than the values are rounded already."""
    before = eqn.invars[0].aval.dtype
    after = eqn.outvars[0].aval.dtype
    return before.kind == after.kind and after.itemsize >= before.itemsize


RULES: dict[str, Rule] = dict.fromkeys([*LINEAR, *OTHERS], elementwise)
