"""Operations that compute each element of the result from the same element of the operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshpar.partition.layout import Layout
from meshpar.partition.plan import Deferred, Placed, Scope
from meshpar.partition.rules.rule import Rule, same
from meshpar.partition.signature import Signature, sharded

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
    "logistic",
    "lt",
    "max",
    "min",
    "ne",
    "nextafter",
    "not",
    "or",
    "polygamma",
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
    return Signature(ins, (out,), same(eqn), linear=linear, views=len(nodes) == 1)  # pyright: ignore


def _keeps_sums(eqn: Any) -> bool:
    """Whether a cast rounds no more than the values are rounded already."""
    before = eqn.invars[0].aval.dtype
    after = eqn.outvars[0].aval.dtype
    return before.kind == after.kind and after.itemsize >= before.itemsize


RULES: dict[str, Rule] = dict.fromkeys([*LINEAR, *OTHERS], elementwise)
