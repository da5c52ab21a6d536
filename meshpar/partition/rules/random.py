"""Random numbers and positions: values that no data decides, made where they are used.

Threefry's bits of an element depend on the key and on the element's index in the whole array. So a shard computes its
own bits from its own indices, and they are those of one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from meshpar.mesh.varying import Axes, varying_alike
from meshpar.partition.layout import Layout
from meshpar.partition.plan import Deferred, Placed, Scope
from meshpar.partition.rules.rule import Rule, bind
from meshpar.partition.signature import Call, Signature


def iota(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    """Positions along a dim; a shard starts at its own."""
    dim = eqn.params["dimension"]
    dtype = eqn.params["dtype"]

    def compute(call: Call) -> list[jax.Array]:
        shape = call.local_shapes[0]
        found = lax.broadcasted_iota(dtype, shape, dim)
        axes = call.axes(dim)
        return [found + (lax.axis_index(axes) * shape[dim]).astype(dtype) if axes else found]

    return [_made_at_use(scope, eqn, nodes, compute)]


def random_bits(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    """The bits of one key. Those of several keys, or of another generator, are made whole."""
    key = eqn.invars[0].aval
    shape = eqn.params["shape"]
    if key.ndim or str(key.dtype) != "key<fry>" or not jax.config.jax_threefry_partitionable:  # pyright: ignore
        none = (None,) * eqn.outvars[0].aval.ndim
        return scope.operation(eqn, Signature(((None,) * key.ndim,), (none,), lambda call, x: bind(eqn, x)), nodes)
    if not shape:
        return scope.operation(eqn, Signature(((),), ((),), lambda call, x: bind(eqn, x)), nodes)

    def compute(call: Call, key: jax.Array) -> list[jax.Array]:
        axes = tuple(call.axes(d) for d in range(len(shape)))
        return [_bits(key, shape, call.local_shapes[0], axes, eqn.params["bit_width"])]

    return [_made_at_use(scope, eqn, nodes, compute)]


def _made_at_use(scope: Scope, eqn: Any, nodes: list[Any], compute: Any) -> Deferred:
    aval = eqn.outvars[0].aval
    labels = tuple(range(aval.ndim))
    signature = Signature(((),) * len(nodes), (labels,), compute)

    def make(axes: tuple[Axes, ...]) -> Placed:
        (placed,) = scope.operation(eqn, signature, nodes, dict(enumerate(axes)))
        return placed

    return Deferred(Layout.whole(aval.shape, aval.dtype), make)


def _bits(key: jax.Array, shape: Any, local_shape: Any, axes: tuple[Axes, ...], bit_width: int) -> jax.Array:
    """The bits of a shard: those of its elements' indices in the whole array, in row-major order."""
    index = jnp.zeros(local_shape, jnp.uint32)
    stride = 1
    for d in reversed(range(len(shape))):
        start = lax.axis_index(axes[d]) * local_shape[d] if axes[d] else 0
        place = lax.broadcasted_iota(jnp.uint32, local_shape, d) + jnp.asarray(start, jnp.uint32)
        index = index + place * jnp.uint32(stride)
        stride *= shape[d]
    if stride > 2**32:
        raise NotImplementedError(f"random bits of {stride} elements")
    first, second = (lax.broadcast(word, local_shape) for word in jax.random.key_data(key))
    arguments = varying_alike(first, second, jnp.zeros_like(index), index)
    high, low = threefry2x32_p.bind(*arguments)
    if bit_width == 64:
        return (high.astype(jnp.uint64) << jnp.uint64(32)) | low.astype(jnp.uint64)
    return (high ^ low).astype(f"uint{bit_width}")


RULES: dict[str, Rule] = {"iota": iota, "random_bits": random_bits}
