"""Products that sum over dims: matrix products, convolutions, products of groups of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.partition.matmul import matmul
from meshpar.partition.plan import Scope
from meshpar.partition.rules.chunks import gathering, in_chunks, lettered
from meshpar.partition.rules.quantized import in_8_bits
from meshpar.partition.rules.rule import Rule, bind, same, signed
from meshpar.partition.signature import Call, Compute, Signature


def dot_general(eqn: Any) -> Signature:
    """`x[M, K] @ w[K, N] -> y[M, N]`: a product over a sharded K is a partial sum."""
    (contracting, batch) = eqn.params["dimension_numbers"]
    left, right = (_labels(v.aval.ndim, i, contracting, batch) for i, v in enumerate(eqn.invars))
    shared = {*left} & {*right}
    batch_labels = [left[i] for i in batch[0]]
    out = (*batch_labels, *(x for x in left if x not in shared), *(x for x in right if x not in shared))
    summed = tuple(left[i] for i in contracting[0])
    compute = _by_matrix(len(contracting[0])) if _is_by_matrix(eqn) else same(eqn)
    equation = lettered((left, right), out) if _is_plain(eqn) else None
    return Signature((left, right), (out,), compute, summed=summed, is_product=True, equation=equation)


def _is_plain(eqn: Any) -> bool:
    """Whether the product is one of floats of one dtype, to whose precision nothing is asked."""
    left, right = (v.aval.dtype for v in eqn.invars)
    is_default = eqn.params["precision"] is None and eqn.params["preferred_element_type"] in (None, left)
    return is_default and left == right and jnp.issubdtype(left, jnp.floating)


def _is_by_matrix(eqn: Any) -> bool:
    """Whether the last dims of the left operand meet the first ones of the right, as those of a layer's input do."""
    (contracting, batch) = eqn.params["dimension_numbers"]
    left, right = (v.aval for v in eqn.invars)
    num = len(contracting[0])
    lasts = (*range(left.ndim - num, left.ndim),)
    fits = (*contracting[0],) == lasts and (*contracting[1],) == (*range(num),) and not batch[0]
    return fits and _is_plain(eqn) and 0 < num < left.ndim and num < right.ndim


def _by_matrix(num_contracted: int) -> Compute:
    """A product whose backward is fast on CPUs, see `matmul`."""

    def compute(call: Call, x: jax.Array, kernel: jax.Array) -> list[jax.Array]:
        width = math.prod(kernel.shape[:num_contracted])
        of_rows = x.reshape(*x.shape[: x.ndim - num_contracted], width)
        return [matmul(of_rows, kernel.reshape(width, -1)).reshape(call.local_shapes[0])]

    return compute


def product(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    """A product; in 8 bits where a layer multiplies by its weights, if the context asks for it."""
    signature = dot_general(eqn)
    if (of_w := in_chunks(scope, eqn, signature, nodes)) is not None:
        return scope.operation(eqn, gathering(scope, signature, nodes, of_w), nodes, stored=of_w)
    return scope.operation(eqn, in_8_bits(scope, eqn, signature, nodes) or signature, nodes)


def _labels(ndim: int, side: int, contracting: Any, batch: Any) -> tuple[Any, ...]:
    named: dict[int, Any] = {i: ("contracting", k) for k, i in enumerate(contracting[side])}
    named |= {i: ("batch", k) for k, i in enumerate(batch[side])}
    return tuple(named.get(i, (side, i)) for i in range(ndim))


def convolution(eqn: Any) -> Signature:
    """Rows and channels may be sharded; the dims over which a window slides are whole."""
    numbers = eqn.params["dimension_numbers"]
    groups = eqn.params["feature_group_count"]
    lhs, rhs, out = ([None] * v.aval.ndim for v in (*eqn.invars, *eqn.outvars))
    if eqn.params["batch_group_count"] == 1:
        lhs[numbers.lhs_spec[0]] = out[numbers.out_spec[0]] = "rows"
    per_channel = (
        groups > 1
        and groups == eqn.invars[0].aval.shape[numbers.lhs_spec[1]] == eqn.invars[1].aval.shape[numbers.rhs_spec[0]]
    )
    if per_channel:
        lhs[numbers.lhs_spec[1]] = rhs[numbers.rhs_spec[0]] = out[numbers.out_spec[1]] = "channels"
    elif groups == 1 and eqn.params["batch_group_count"] == 1:
        lhs[numbers.lhs_spec[1]] = rhs[numbers.rhs_spec[1]] = "in"
        rhs[numbers.rhs_spec[0]] = out[numbers.out_spec[1]] = "out"

    def compute(call: Call, x: jax.Array, kernel: jax.Array) -> list[jax.Array]:
        own = x.shape[numbers.lhs_spec[1]] if per_channel else groups
        return bind(eqn, x, kernel, feature_group_count=own)

    return Signature((tuple(lhs), tuple(rhs)), (tuple(out),), compute, summed=("in",))


def ragged_dot(eqn: Any) -> Signature:
    """`x[M, K] @ w[G, K, N] -> y[M, N]`, rows by groups. The rows are whole: a group may be on any device."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracting, batch) = numbers.dot_dimension_numbers
    left, right = (list(_labels(v.aval.ndim, i, contracting, batch)) for i, v in enumerate(eqn.invars[:2]))
    for i in numbers.lhs_ragged_dimensions:
        left[i] = None
    for i in numbers.rhs_group_dimensions:
        right[i] = None
    shared = {*left} & {*right} - {None}
    if len(eqn.outvars[0].aval.shape) != 2 or batch[0] or left[contracting[0][0]] is None:
        return Signature(
            tuple((None,) * v.aval.ndim for v in eqn.invars), ((None,) * eqn.outvars[0].aval.ndim,), same(eqn)
        )
    out = (
        *(x for x in left if x not in shared),
        *(x for i, x in enumerate(right) if x not in shared and x is not None),
    )
    summed = tuple(left[i] for i in contracting[0])
    return Signature((tuple(left), tuple(right), (None,)), (out,), same(eqn), summed=summed)


RULES: dict[str, Rule] = {
    "dot_general": product,
    "conv_general_dilated": signed(convolution),
    "ragged_dot_general": signed(ragged_dot),
}
