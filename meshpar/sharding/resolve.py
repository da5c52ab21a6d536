"""Resolve: (specs, rules, mesh) to placements, or to one error that lists every misfit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshpar.errors import Problems, ShardingError, nearest
from meshpar.mesh.layout import AXES, describe_sizes
from meshpar.sharding.rules import ACTIVATION_DIMS, AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.tree import flatten_with_paths, human_bytes, map_with_path

AnyMesh = Mesh | AbstractMesh


@dataclass(frozen=True)
class Placement:
    """One array on a mesh: for each dim the axes that it is sharded over, and the rule that said so."""

    spec: ArraySpec
    mesh: AnyMesh
    axes: tuple[tuple[str, ...], ...]
    reason: tuple[str, ...]

    @property
    def pspec(self) -> PartitionSpec:
        return PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in self.axes))

    @property
    def sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, self.pspec)  # pyright: ignore[reportArgumentType]

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.spec.shape, self.spec.dtype, sharding=self.sharding)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the part that one device holds."""
        sizes = self.mesh.shape
        shards = (math.prod(sizes[a] for a in axes) for axes in self.axes)
        return tuple(size // n for size, n in zip(self.spec.shape, shards, strict=True))

    @property
    def local_bytes(self) -> int:
        """Bytes of the part that one device holds."""
        return math.prod(self.local_shape) * self.spec.dtype.itemsize

    def copies(self, axes: tuple[str, ...]) -> int:
        """How many of the devices along `axes` hold the same part."""
        mine = {axis for axes in self.axes for axis in axes}
        return math.prod(self.mesh.shape[axis] for axis in axes if axis not in mine)

    def without(self, axes: tuple[str, ...]) -> Placement:
        """The same array once it is gathered over `axes`."""
        return replace(self, axes=tuple(tuple(a for a in mine if a not in axes) for mine in self.axes))


def live(mesh: AnyMesh, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes that really divide something: those of size 1 appear in no sharding and no collective."""
    return tuple(a for a in axes if mesh.shape[a] > 1)


def sharding_axes(placements: Iterable[Placement]) -> tuple[str, ...]:
    """The axes that shard any of the arrays, in the order of the mesh."""
    used = {axis for placement in placements for axes in placement.axes for axis in axes}
    return tuple(axis for axis in AXES if axis in used)


def resolve(specs: Any, rules: AxisRules, mesh: AnyMesh, beside: Any = None) -> Any:
    """Places every array of a model.

    Args:
      specs: a tree of `ArraySpec`.
      rules: dim -> axes.
      mesh: real or abstract.
      beside: another such tree, which the rules are about too; it is checked with the first.

    Returns:
      The same tree of `Placement`s, fully sharded as the rules say; `Placement.without` derives the others.

    Raises:
      ShardingError: lists every array with a dim that has no rule, is not divisible, or uses an axis twice;
        every rule that matches nothing; and every axis of the mesh that no rule uses.
    """
    problems = Problems()
    arrays = flatten_with_paths(specs) | flatten_with_paths(beside)
    _check_rules(arrays, rules, mesh, problems)
    misfits = sum(_check_array(path, spec, rules, mesh, problems) for path, spec in arrays.items())
    subject = f"{misfits} array{'s do' if misfits > 1 else ' does'}" if misfits else "the rules do"
    problems.raise_any(ShardingError, f"{subject} not fit mesh ({describe_sizes(dict(mesh.shape))}):")
    return map_with_path(lambda _, spec: _place(spec, rules, mesh), specs)


def _place(spec: ArraySpec, rules: AxisRules, mesh: AnyMesh) -> Placement:
    axes = tuple(live(mesh, rules[dim]) for dim in spec.dims)
    return Placement(spec, mesh, axes, tuple(_rule(rules, dim) for dim in spec.dims))


def _rule(rules: AxisRules, dim: str) -> str:
    return f"{dim} -> {', '.join(rules[dim]) or '[]'}   ({rules.source(dim)})"


def _check_rules(arrays: dict[str, ArraySpec], rules: AxisRules, mesh: AnyMesh, problems: Problems) -> None:
    dims = {dim for spec in arrays.values() for dim in spec.dims} | set(ACTIVATION_DIMS)
    for dim, axes in rules.explicit.items():
        if dim not in dims:
            near = nearest(dim, dims)
            problems.add(f"rules.{dim}", "no parameter has such a dim", f"did you mean rules.{near}?" if near else "")
        for axis in (a for a in axes if a not in AXES):
            problems.add(f"rules.{dim}", f"the mesh has no axis {axis!r}", f"its axes are {', '.join(AXES)}")
    used = {axis for dim in dims & rules.table.keys() for axis in rules[dim]}
    for axis, size in mesh.shape.items():
        if size > 1 and axis not in used:
            what = f"no rule uses this axis: its {size} devices would all do the same work"
            problems.add(f"mesh.{axis} = {size}", what, f"mesh.{axis}=1, or a rule or preset that uses it")


def _check_array(path: str, spec: ArraySpec, rules: AxisRules, mesh: AnyMesh, problems: Problems) -> bool:
    """Adds the problems of one array, as one entry under its path; says whether there are any."""
    found: list[tuple[str, str]] = []
    owner: dict[str, str] = {}
    for size, dim in zip(spec.shape, spec.dims, strict=True):
        if dim not in rules.table:
            near = nearest(dim, set(rules.table))
            hint = f" (there is one for {near})" if near else ""
            found.append((f"no rule covers {dim}{hint}", f"rules.{dim}=[] to leave it whole, or a preset"))
            continue
        for axis in live(mesh, tuple(a for a in rules[dim] if a in AXES)):
            if owner.setdefault(axis, dim) != dim:
                found.append((f"{owner[axis]} and {dim} are both sharded over {axis}", f"rules.{dim}=[]"))
        found += _indivisible(size, dim, spec, rules, mesh)
    for what, fix in found:
        problems.add(f"{path}  {spec}", what, fix)
    return bool(found)


def _indivisible(size: int, dim: str, spec: ArraySpec, rules: AxisRules, mesh: AnyMesh) -> list[tuple[str, str]]:
    axes = live(mesh, tuple(a for a in rules[dim] if a in AXES))
    shards = math.prod(mesh.shape[a] for a in axes)
    if size % shards == 0:
        return []
    what = f"{dim} = {size} is not divisible by {' x '.join(f'{a} = {mesh.shape[a]}' for a in axes)}"
    extra = spec.num_bytes - spec.num_bytes // shards
    change = f"mesh.{axes[-1]}={math.gcd(size, mesh.shape[axes[-1]])}"
    fix = f"either {change}, or rules.{dim}=[] to replicate it (at most +{human_bytes(extra)} per device)"
    return [(f"{what}    rule {_rule(rules, dim)}", fix)]
