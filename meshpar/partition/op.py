"""The primitive of an operation whose signature says how it is partitioned.

This file depends on `jax.extend.core`, and on `jax.interpreters`, with which it defines the primitive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import core
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from meshpar.partition.signature import Call, Labels, Signature

partitioned_p = Primitive("partitioned")
partitioned_p.multiple_results = True


def apply(signature: Signature, *arrays: Any) -> list[Any]:
    """Computes an operation with this signature: whole arrays outside of a partitioned program."""
    return partitioned_p.bind(*arrays, signature=signature)


def whole(signature: Signature) -> Callable[..., list[Any]]:
    """What an operation computes of whole arrays."""
    return lambda *arrays: list(signature.compute(Call({}, (), {}), *arrays))


def _abstract(*avals: Any, signature: Signature) -> list[Any]:
    structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    return [core.ShapedArray(x.shape, x.dtype) for x in jax.eval_shape(whole(signature), *structs)]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, signature: Signature) -> Any:
    return jax.jvp(whole(signature), tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


def _batched(arrays: Sequence[Any], dims: Sequence[Any], *, signature: Signature) -> Any:
    """Under `jax.vmap` each array has one more dim in front, which any axis may shard."""
    new = object()
    mapped = [dim is not None for dim in dims]
    moved = [
        jax.numpy.moveaxis(x, dim, 0) if is_mapped else x
        for x, dim, is_mapped in zip(arrays, dims, mapped, strict=True)
    ]

    def compute(call: Call, *shards: Any) -> Any:
        axes = [0 if is_mapped else None for is_mapped in mapped]
        return jax.vmap(lambda *rows: tuple(signature.compute(call, *rows)), axes)(*shards)

    def with_new(labels: Labels, is_mapped: bool = True) -> Labels:
        return (new, *labels) if is_mapped else labels

    ins = tuple(map(with_new, signature.ins, mapped))
    outs = tuple(map(with_new, signature.outs))
    batched = Signature(ins, outs, compute, signature.summed, signature.closed)
    return apply(batched, *moved), [0] * len(outs)


partitioned_p.def_impl(lambda *arrays, signature: whole(signature)(*arrays))
partitioned_p.def_abstract_eval(_abstract)
mlir.register_lowering(
    partitioned_p,
    mlir.lower_fun(lambda *arrays, signature: whole(signature)(*arrays), multiple_results=True),
)
ad.primitive_jvps[partitioned_p] = _jvp
batching.primitive_batchers[partitioned_p] = _batched
