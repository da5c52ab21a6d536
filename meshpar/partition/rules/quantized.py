"""The products of a layer's input and its weights in 8 bits, as meshpar's own layers compute them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.partition.plan import Deferred, Scope
from meshpar.partition.signature import Call, Signature

UNROUNDED = {"vocab", "positions", "experts", "router"}
"""Dims of weights that are multiplied unrounded: embeddings, the head, routers and routed experts."""


def in_8_bits(scope: Scope, eqn: Any, signature: Signature, nodes: list[Any]) -> Signature | None:
    """The signature of a product in the context's 8-bit format; None for a product that is not rounded.

    Rounded is a product of a weight, which follows from parameters alone, and a value that does not. Its weight has
    inputs and outputs, no dims that are neither, and none of `UNROUNDED`. A product in a derivative of the user's own
    is not rounded.

    Communication: the all-reduces of `quantized.matmuls`.
    """
    number_format = scope.ctx.number_format
    weights = [i for i, node in enumerate(nodes) if node.layout.is_weight]
    if number_format is None or scope.is_derivative or len(weights) != 1:
        return None
    contracting, batch = eqn.params["dimension_numbers"]
    of_w = weights[0]
    of_x = 1 - of_w
    x, w = nodes[of_x], nodes[of_w]
    num_inputs = len(contracting[of_w])
    is_matrix = not batch[of_w] and 0 < num_inputs < len(w.layout.shape)
    is_float = all(jnp.issubdtype(node.layout.dtype, jnp.floating) for node in nodes)
    if isinstance(x, Deferred) or not is_matrix or not is_float or {*w.layout.names} & UNROUNDED:
        return None
    scope.in_8_bits.append(scope.source(eqn).line)
    dtype = eqn.outvars[0].aval.dtype

    def compute(call: Call, *shards: jax.Array) -> list[jax.Array]:
        from meshpar.parallel import quantized  # and Qwix, which other runs do not need

        rows, inputs = _split(signature.ins[of_x], contracting[of_x])
        outputs, _ = _split(signature.ins[of_w], contracting[of_w])
        shards_of = quantized.Shards(call.axes(*rows), call.axes(*inputs), call.axes(*outputs))
        matrix = _matrix(shards[of_w], contracting[of_w], first=True)
        tokens = _matrix(shards[of_x], contracting[of_x], first=False)[None]
        (y,) = quantized.matmuls(tokens, [matrix], number_format, shards_of)
        num_rows = len(rows)
        local = call.local_shapes[0]
        if of_w == 1:
            return [y.reshape(local).astype(dtype)]
        after = len(local) - num_rows
        turned = y.reshape(*local[after:], *local[:after])
        return [jnp.moveaxis(turned, range(num_rows), range(after, len(local))).astype(dtype)]

    return replace(signature, compute=compute, equation=None)


def _split(labels: tuple[Any, ...], contracting: Any) -> tuple[list[Any], list[Any]]:
    """The labels of the dims that stay, and of those that are summed."""
    return [x for i, x in enumerate(labels) if i not in contracting], [labels[i] for i in contracting]


def _matrix(x: jax.Array, contracting: Any, first: bool) -> jax.Array:
    """The operand as a matrix, whose inputs are its first or its last dim."""
    size = math.prod(x.shape[i] for i in contracting)
    if first:
        return jnp.moveaxis(x, contracting, range(len(contracting))).reshape(size, -1)
    return jnp.moveaxis(x, contracting, range(x.ndim - len(contracting), x.ndim)).reshape(-1, size)
