"""Operations that move elements without computing: views, parts, and arrays put together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import lax

from meshpar.mesh.varying import Axes
from meshpar.partition.layout import Layout, count
from meshpar.partition.plan import Deferred, Placed, Scope
from meshpar.partition.program import Use
from meshpar.partition.rules.rule import Rule, bind, dims, same, signed
from meshpar.partition.signature import Call, Signature


def broadcast_in_dim(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    """A broadcast is made where it is used, so that no device makes more of it than it needs."""
    return _broadcast(scope, eqn, nodes, eqn.params["broadcast_dimensions"])


def _broadcast(scope: Scope, eqn: Any, nodes: list[Any], places: Sequence[int]) -> Sequence[Any]:
    (node,) = nodes
    out = eqn.outvars[0].aval
    labels = tuple(d if node.layout.shape[i] == out.shape[d] else None for i, d in enumerate(places))

    def compute(call: Call, x: jax.Array) -> list[jax.Array]:
        return [lax.broadcast_in_dim(x, call.local_shapes[0], places)]

    signature = Signature((labels,), (tuple(range(out.ndim)),), compute)

    def make(axes: Any) -> Placed:
        return scope.operation(eqn, signature, nodes, dict(enumerate(axes)))[0]

    wanted = scope.settled_axes(node.layout)
    axes = {label: over for label, over in zip(labels, wanted, strict=True) if label is not None}
    names = {label: name for label, name in zip(labels, node.layout.names, strict=True) if label is not None}
    layout = Layout(
        tuple(out.shape), out.dtype, tuple(axes.get(d, ()) for d in range(out.ndim)),
        tuple(names.get(d, "") for d in range(out.ndim)),
    )  # fmt: skip
    return [Deferred(layout, make)]


def transpose(eqn: Any) -> Signature:
    labels = dims(eqn.invars[0].aval)
    out = tuple(labels[i] for i in eqn.params["permutation"])
    return Signature((labels,), (out,), same(eqn), linear="one", views=True)


def squeeze(eqn: Any) -> Signature:
    labels = dims(eqn.invars[0].aval)
    out = tuple(label for label in labels if label not in eqn.params["dimensions"])
    return Signature((labels,), (out,), same(eqn), linear="one", views=True)


def reshape(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    """Dims are merged or split. The first of merged dims, and the first that a dim is split into, may be sharded."""
    (node,) = nodes
    old = node.layout.shape
    new = tuple(eqn.outvars[0].aval.shape)
    wanted = scope.settled_axes(node.layout)
    ins: list[Any] = [None] * len(old)
    outs: list[Any] = [None] * len(new)
    assigned = {}
    for group, others in _groups(old, new):
        before = [i for i in group if old[i] > 1]
        after = [i for i in others if new[i] > 1]
        if not before or not after:
            continue
        ins[before[0]] = outs[after[0]] = before[0]
        # What shards a later dim may shard the first instead: an all-to-all costs less than a gather.
        axes = next((wanted[i] for i in before if wanted[i]), ())
        n = count(axes, scope.sizes)
        assigned[before[0]] = axes if old[before[0]] % n == 0 and new[after[0]] % n == 0 else ()

    def compute(call: Call, x: jax.Array) -> list[jax.Array]:
        return [lax.reshape(x, call.local_shapes[0])]

    signature = Signature((tuple(ins),), (tuple(outs),), compute, linear="one", views=True)
    if isinstance(node, Placed):
        return scope.operation(eqn, signature, nodes, assigned)
    return [_deferred_view(scope, eqn, signature, node, assigned)]


def _deferred_view(scope: Scope, eqn: Any, signature: Signature, node: Deferred, assigned: Any) -> Deferred:
    """A view of a value that is made where it is used; made whole where the use shards it in another way."""
    (labels,) = signature.outs

    def make(axes: Any) -> Placed:
        asked: dict[Any, Axes] = {x: over for x, over in zip(labels, axes, strict=True) if x is not None}
        sizes = node.layout.shape
        fits = all(sizes[label] % count(over, scope.sizes) == 0 for label, over in asked.items())
        (placed,) = scope.operation(eqn, signature, [node], asked if fits else {})
        return placed if placed.layout.axes == axes else scope.settled(placed, axes)

    out = eqn.outvars[0].aval
    axes = tuple(assigned.get(label, ()) for label in labels)
    names = dict(zip(signature.ins[0], node.layout.names, strict=True))
    return Deferred(
        Layout(tuple(out.shape), out.dtype, axes, tuple(names.get(x, "") if x is not None else "" for x in labels)),
        make,
    )


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The dims before and after that hold the same elements, smallest groups first.

    >>> _groups((2, 3, 4), (6, 2, 2))
    [([0, 1], [0]), ([2], [1, 2])]
    """
    groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        before, after = [*range(i, min(i + 1, len(old)))], [*range(j, min(j + 1, len(new)))]
        while math.prod(old[k] for k in before) != math.prod(new[k] for k in after):
            if math.prod(old[k] for k in before) < math.prod(new[k] for k in after):
                before.append(i + len(before))
            else:
                after.append(j + len(after))
        groups.append((before, after))
        i += len(before)
        j += len(after)
    return groups


def slice_(eqn: Any) -> Signature:
    """A part of some dims, which have to be whole; the others may be sharded."""
    params = eqn.params
    shape = eqn.invars[0].aval.shape
    strides = params["strides"] or (1,) * len(shape)
    parts = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    cut = [i for i, part in enumerate(parts) if part != (0, shape[i], 1)]
    labels = dims(eqn.invars[0].aval, *cut)

    def compute(call: Call, x: jax.Array) -> list[jax.Array]:
        limits = [limit if i in cut else x.shape[i] for i, limit in enumerate(params["limit_indices"])]
        return [lax.slice(x, params["start_indices"], limits, params["strides"])]

    return Signature((labels,), (labels,), compute, views=True)


def split(eqn: Any) -> Signature:
    labels = dims(eqn.invars[0].aval, eqn.params["axis"])
    return Signature((labels,), (labels,) * len(eqn.outvars), same(eqn), views=True)


def concatenate(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    """Layers that are parameters of their own stay in shards when they are stacked for a loop, which gathers them."""
    dim = eqn.params["dimension"]
    layouts = [node.layout for node in nodes]
    stored = layouts[0].stored
    if stored and all(one.stored == stored for one in layouts) and dim not in dict(stored) and not layouts[0].axes[dim]:
        layout = replace(layouts[0], shape=tuple(eqn.outvars[0].aval.shape))
        return scope.step(partial(bind, eqn), [Use(node.register) for node in nodes], [layout], scope.source(eqn))
    labels = dims(eqn.outvars[0].aval, dim)
    return scope.operation(eqn, Signature((labels,) * len(eqn.invars), (labels,), same(eqn), views=True), nodes)


def stack(eqn: Any) -> Signature:
    axis = eqn.params["axis"]
    labels = dims(eqn.invars[0].aval)
    out = (*labels[:axis], None, *labels[axis:])
    return Signature((labels,) * len(eqn.invars), (out,), same(eqn), views=True)


def unstack(eqn: Any) -> Signature:
    axis = eqn.params["axis"] % eqn.invars[0].aval.ndim
    labels = dims(eqn.invars[0].aval, axis)
    out = (*labels[:axis], *labels[axis + 1 :])
    return Signature((labels,), (out,) * len(eqn.outvars), same(eqn), views=True)


def tile(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    """Dims that are repeated have to be whole. To repeat dims of size 1 is a broadcast."""
    shape = eqn.invars[0].aval.shape
    repeated = [i for i, times in enumerate(eqn.params["reps"]) if times != 1]
    if all(shape[i] == 1 for i in repeated):
        return _broadcast(scope, eqn, nodes, range(len(shape)))
    labels = dims(eqn.invars[0].aval, *repeated)
    return scope.operation(eqn, Signature((labels,), (labels,), same(eqn)), nodes)


def pad(eqn: Any) -> Signature:
    padded = [i for i, config in enumerate(eqn.params["padding_config"]) if tuple(config) != (0, 0, 0)]
    labels = dims(eqn.outvars[0].aval, *padded)
    return Signature((labels, ()), (labels,), same(eqn))


def rev(eqn: Any) -> Signature:
    labels = dims(eqn.invars[0].aval, *eqn.params["dimensions"])
    return Signature((labels,), (labels,), same(eqn))


def dynamic_slice(eqn: Any) -> Signature:
    shape = eqn.invars[0].aval.shape
    sizes = eqn.params["slice_sizes"]
    labels = dims(eqn.invars[0].aval, *(i for i, size in enumerate(sizes) if size != shape[i]))

    def compute(call: Call, x: jax.Array, *starts: jax.Array) -> list[jax.Array]:
        return bind(eqn, x, *starts, slice_sizes=call.local_shapes[0])

    return Signature((labels, *((),) * (len(eqn.invars) - 1)), (labels,), compute)


def dynamic_update_slice(eqn: Any) -> Signature:
    shape = eqn.invars[0].aval.shape
    sizes = eqn.invars[1].aval.shape
    labels = dims(eqn.invars[0].aval, *(i for i, size in enumerate(sizes) if size != shape[i]))
    return Signature((labels, labels, *((),) * (len(eqn.invars) - 2)), (labels,), same(eqn))


RULES: dict[str, Rule] = {
    "broadcast_in_dim": broadcast_in_dim,
    "reshape": reshape,
    "transpose": signed(transpose),
    "squeeze": signed(squeeze),
    "slice": signed(slice_),
    "split": signed(split),
    "concatenate": concatenate,
    "stack": signed(stack),
    "unstack": signed(unstack),
    "tile": tile,
    "pad": signed(pad),
    "rev": signed(rev),
    "dynamic_slice": signed(dynamic_slice),
    "dynamic_update_slice": signed(dynamic_update_slice),
}
