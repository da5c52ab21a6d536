"""Shardings that the user's code declares for a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from meshpar.errors import Problems, ShardingError
from meshpar.mesh.varying import Axes
from meshpar.partition.layout import Layout, count
from meshpar.partition.plan import Deferred, Placed, Scope
from meshpar.partition.rules.rule import Rule


def sharding_constraint(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    """`with_sharding_constraint`, by axes or by names. A dim that it leaves open keeps its sharding."""
    node = scope.ready(nodes[0])
    declared = _declared(scope, eqn, eqn.params["sharding"])
    free = set(eqn.params.get("unconstrained_dims", ()))
    now = scope.settled_axes(node.layout)
    axes = tuple(now[i] if i in free or over is None else over for i, over in enumerate(declared))
    return [replace(scope.settled(node, axes, scope.source(eqn)))]


def reshard(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    """JAX's change of an explicit sharding. One to automatic axes leaves the value as it is."""
    sharding = eqn.params["dst_sharding"]
    if not _is_explicit(sharding) or _is_stored(scope, nodes[0].layout, _declared(scope, eqn, sharding)):
        return nodes
    return [_settled(scope, eqn, sharding, nodes[0])]


def following(rule: Rule, key: str) -> Rule:
    """The rule of an operation whose result has the explicit sharding that its parameter `key` declares, if it does.

    A value that depends on no data is made where it is used, in the layout of that use, whatever it declares. JAX types
    the results of all other operations too. Those types follow from the declared ones, and declare nothing.
    """

    def followed(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
        results = rule(scope, eqn, nodes)
        sharding = eqn.params.get(key)
        if sharding is None or not _is_explicit(sharding):
            return results
        return [x if isinstance(x, Deferred) else _settled(scope, eqn, sharding, x) for x in results]

    return followed


def _settled(scope: Scope, eqn: Any, sharding: Any, node: Any) -> Placed:
    if sharding.spec.unreduced:  # the sum stays pending, as the planner leaves sums
        return node
    axes = tuple(over or () for over in _declared(scope, eqn, sharding))
    return replace(scope.settled(node, axes, scope.source(eqn)))


def _is_explicit(sharding: Any) -> bool:
    return isinstance(sharding, NamedSharding) and sharding.mesh.are_all_axes_explicit


def _is_stored(scope: Scope, layout: Layout, declared: Sequence[Axes | None]) -> bool:
    """Whether a parameter is stored as it is declared. It is gathered by its first use, not here."""
    stored = dict(layout.stored)
    own = [{*over, *stored.get(i, ())} for i, over in enumerate(layout.axes)]
    return bool(stored) and own == [{*(over or ())} for over in declared]


def _declared(scope: Scope, eqn: Any, sharding: Any) -> list[Axes | None]:
    """The axes of each dim, without those of size 1; None for a dim that is left open.

    Raises:
      ShardingError: the mesh has no such axis, an axis shards two dims, or it does not divide a dim.
    """
    # A model may call the mesh's axes by names of its own: they are in the order of the mesh.
    ours = dict(zip(map(str, sharding.mesh.axis_names), scope.sizes, strict=False))
    shape = eqn.outvars[0].aval.shape
    spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    problems = Problems()
    where = scope.source(eqn).line
    used: list[str] = []
    found: list[Axes | None] = []
    for size, part in zip(shape, spec, strict=True):
        if part is PartitionSpec.UNCONSTRAINED:
            found.append(None)
            continue
        names = () if part is None else (part,) if isinstance(part, str) else tuple(part)
        for name in (name for name in names if name not in ours):
            problems.add(where, f"the mesh has no axis {name!r}", f"its axes are {', '.join(scope.sizes)}")
        over = tuple(ours[name] for name in names if name in ours and scope.sizes[ours[name]] > 1)
        for axis in (axis for axis in over if axis in used):
            problems.add(where, f"two dims are sharded over {axis}", "leave one of them whole: None")
        if size % count(over, scope.sizes):
            shards = " x ".join(f"{axis} = {scope.sizes[axis]}" for axis in over)
            problems.add(where, f"a dim of {size} is not divisible by {shards}", "leave it whole: None")
        used += over
        found.append(over)
    problems.raise_any(ShardingError, "a sharding that the model declares does not fit the mesh:")
    return found


RULES: dict[str, Rule] = {"sharding_constraint": sharding_constraint, "reshard": reshard}
FOLLOWING = {
    "dot_general": "out_sharding",
    "reduce_sum": "out_sharding",
    "reshape": "sharding",
    "convert_element_type": "sharding",
}
"""Operations whose results may be declared -> the parameter that declares it."""
