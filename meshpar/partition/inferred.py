"""Infers names for the dims of a model that names none, from the products of its loss.

Every dim of a parameter gets a name of its own, and the loss is planned on one device: names that an operation joins
belong to one class. A class of dims that some products grow and others shrink is what tensor parallelism shards: the
hidden dim of an MLP, the heads of attention. The class that most parameters share is that of the residual stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from meshpar.errors import ConfigError
from meshpar.mesh.layout import MeshLayout
from meshpar.parallel.context import ParallelContext
from meshpar.partition.layout import Layout
from meshpar.partition.plan import Scope
from meshpar.partition.rules import RULES
from meshpar.partition.signature import Signature
from meshpar.sharding.rules import UNNAMED, AxisRules
from meshpar.tree import flatten_with_paths

Dims = dict[str, tuple[str, ...]]
GROWN_AND_SHRUNK = "mlp"
RESIDUAL = "embed"
STACKED = "layers"


def inferred_dims(
    params: Any, loss: Callable[..., Any], batch: Mapping[str, Any], key: jax.Array | None = None, carried: Any = None
) -> Dims:
    """Infers a name for each dim of the parameters, see `interop.inferred.infer_dims`.

    Args:
      loss: (params, batch, key), or with carried state (params, batch, key, carried).

    Raises:
      ConfigError: no product grows a dim that another one shrinks.
    """
    paths = flatten_with_paths(params)
    found = _observed(params, loss, batch, key, carried)
    classes = _classes(found)
    pairs = {c for c, roles in classes.items() if {"grown", "shrunk"} <= roles.kinds and "between" not in roles.kinds}
    sizes = {c: len(roles.params) for c, roles in classes.items()}
    residual = max(pairs, key=lambda c: sizes[c], default=None)
    if residual is not None and len(pairs) > 1:
        pairs -= {residual}
    else:
        residual = None
    pairs = _one_a_parameter(pairs, sizes, paths, found)
    if not pairs:
        raise ConfigError("no product of the loss grows a dim that another one shrinks; name the dims by dims=")
    names = dict.fromkeys(pairs, GROWN_AND_SHRUNK) | ({residual: RESIDUAL} if residual is not None else {})

    def named(path: str, ndim: int) -> tuple[str, ...]:
        own = [_name(path, i) for i in range(ndim)]
        return tuple(STACKED if one in found.scanned else names.get(found.joined.of(one), UNNAMED) for one in own)

    # A variable of NNX is a box, whose array `dims` name by the variable's own path.
    return {path.removesuffix(".value"): named(path, len(x.shape)) for path, x in paths.items()}


def _one_a_parameter(pairs: set[str], sizes: Mapping[str, int], paths: Mapping[str, Any], found: _Observed) -> set[str]:
    """Of the classes that meet in one parameter, such as heads and their dims, only the largest is sharded."""
    pairs = set(pairs)
    for path, x in paths.items():
        classes = [found.joined.of(_name(path, i)) for i in range(len(x.shape))]
        meeting = sorted({c for c in classes if c in pairs}, key=lambda c: (-sizes[c], classes.index(c)))
        pairs -= {*meeting[1:]}
        pairs -= {c for c in meeting if classes.count(c) > 1}
    return pairs


class _Joined:
    """Classes of names, by union."""

    def __init__(self) -> None:
        self.parent: dict[str, str] = {}

    def of(self, name: str) -> str:
        while name in self.parent:
            name = self.parent[name]
        return name

    def join(self, names: Iterable[str]) -> None:
        first, *others = [self.of(name) for name in names]
        for other in others:
            if other != first:
                self.parent[other] = first


@dataclass
class _Observed:
    """What the operations of a loss say about names.

    Args:
      joined: the classes of names that operations join.
      roles: (name, role): a product grows the dim of a parameter, shrinks it, or contracts it between two activations.
      scanned: names of dims that a loop scans.
    """

    joined: _Joined = field(default_factory=_Joined)
    roles: set[tuple[str, str]] = field(default_factory=set)
    scanned: set[str] = field(default_factory=set)

    def operation(self, eqn: Any, signature: Signature, layouts: Sequence[Layout]) -> None:
        names: dict[Any, list[str]] = defaultdict(list)
        for labels, layout in zip(signature.ins, layouts, strict=True):
            for label, name in zip(labels, layout.names, strict=True):
                if label is not None and name:
                    names[label].append(name)
        for joined in names.values():
            self.joined.join(joined)
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            self._product(signature, layouts)

    def loop(self, layout: Layout) -> None:
        self.scanned.add(layout.names[0])

    def _product(self, signature: Signature, layouts: Sequence[Layout]) -> None:
        is_between = not any(layout.is_pinned for layout in layouts)
        for labels, layout in zip(signature.ins, layouts, strict=True):
            for label, name in zip(labels, layout.names, strict=True):
                if not name or label is None:
                    continue
                if label in signature.summed:
                    self.roles.add((name, "between" if is_between else "shrunk"))
                elif layout.is_pinned:
                    self.roles.add((name, "grown"))


@dataclass
class _Class:
    params: set[str] = field(default_factory=set)
    kinds: set[str] = field(default_factory=set)


def _classes(found: _Observed) -> dict[str, _Class]:
    classes: dict[str, _Class] = defaultdict(_Class)
    for name, role in found.roles:
        one = classes[found.joined.of(name)]
        one.kinds.add(role)
        one.params.add(name)
    return classes


def _name(path: str, dim: int) -> str:
    return f"{path}:{dim}"


def _observed(params: Any, loss: Callable[..., Any], batch: Mapping[str, Any], key: Any, carried: Any) -> _Observed:
    """Plans a loss on one device, where each dim of a parameter has a name of its own."""
    arguments = (params, dict(batch), key, *([] if carried is None else [carried]))
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(arguments)]
    tree = jax.tree.structure(arguments)
    closed = jax.make_jaxpr(lambda *leaves: loss(*jax.tree.unflatten(tree, leaves)))(*structs)
    mesh = MeshLayout().abstract(1)
    ctx = ParallelContext(mesh=mesh, rules=AxisRules(preset="replicated"), manual=True, activation_dims=())
    found = _Observed()
    scope = Scope(ctx, RULES, observer=found)
    layouts = [
        replace(
            Layout.whole(x.shape, x.dtype), names=tuple(_name(path, i) for i in range(len(x.shape))), is_pinned=True
        )
        for path, x in flatten_with_paths(params).items()
    ]
    layouts += [Layout.whole(x.shape, x.dtype) for x in structs[len(layouts) :]]
    scope.plan(closed.jaxpr, closed.consts, [scope.input(layout) for layout in layouts])
    return found
