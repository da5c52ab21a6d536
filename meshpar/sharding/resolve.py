"""Resolves (specs, rules, mesh) to placements, or raises one error that lists every problem."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshpar.errors import Problems, ShardingError, nearest
from meshpar.mesh.layout import AXES, describe_sizes
from meshpar.sharding.rules import ACTIVATION_DIMS, LARGEST, UNNAMED, AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.tree import flatten_with_paths, human_bytes, map_with_path

AnyMesh = Mesh | AbstractMesh
HOST = "pinned_host"
"""JAX's name for the memory of the host that a device can read and write directly."""


@dataclass(frozen=True)
class Placement:
    """The sharding of one array on a mesh: the mesh axes of each dim, and the rule that assigns them.

    Args:
      axes: the mesh axes over which each dim is sharded; `()` for a dim that is whole.
      reason: the rule of each dim, as text; empty for arrays that no report lists.
      memory_kind: JAX's name of the memory in which a device stores its shard, such as `HOST`; None for its own.

    >>> from jax.numpy import dtype
    >>> from meshpar.mesh.layout import MeshLayout
    >>> spec = ArraySpec((512, 64), dtype("float32"), ("embed", "mlp"))
    >>> placement = Placement(spec, MeshLayout(fsdp=4).abstract(), (("fsdp",), ()))
    >>> placement.local_shape, placement.local_bytes
    ((128, 64), 32768)
    """

    spec: ArraySpec
    mesh: AnyMesh
    axes: tuple[tuple[str, ...], ...]
    reason: tuple[str, ...] = ()
    memory_kind: str | None = None

    @property
    def pspec(self) -> PartitionSpec:
        return PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in self.axes))

    @property
    def sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, self.pspec, memory_kind=self.memory_kind)  # pyright: ignore

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.spec.shape, self.spec.dtype, sharding=self.sharding)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of a local shard."""
        sizes = self.mesh.shape
        shards = (math.prod(sizes[a] for a in axes) for axes in self.axes)
        return tuple(size // n for size, n in zip(self.spec.shape, shards, strict=True))

    @property
    def local_bytes(self) -> int:
        """The bytes of a local shard."""
        return math.prod(self.local_shape) * self.spec.dtype.itemsize

    def copies(self, axes: tuple[str, ...]) -> int:
        """How many of the devices along `axes` hold the same shard."""
        sharded = {axis for axes in self.axes for axis in axes}
        return math.prod(self.mesh.shape[axis] for axis in axes if axis not in sharded)

    def gathered(self, rules: AxisRules) -> Placement:
        """The placement of the array after it is gathered over its storage axes."""
        dims = zip(self.spec.dims, self.axes, strict=True)
        return replace(self, axes=tuple(tuple(a for a in axes if rules.use(dim, a) != "storage") for dim, axes in dims))


def platform_of(mesh: AnyMesh) -> str | None:
    """The platform of the mesh's devices, such as `cpu`; None if an abstract mesh does not say one."""
    device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else mesh.abstract_device
    return device.platform if device else None


def is_compile_only(mesh: AnyMesh) -> bool:
    """Whether the mesh describes devices of another machine, for which programs can only be compiled."""
    if not isinstance(mesh, Mesh):
        return mesh.abstract_device is not None
    return getattr(mesh.devices.flat[0].client, "runtime_type", "") == "compile_only_runtime"


def live(mesh: AnyMesh, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of size > 1. Axes of size 1 appear in no sharding and no collective.

    Axes that the mesh does not have are left out too; `resolve` reports them.
    """
    return tuple(a for a in axes if mesh.shape.get(a, 1) > 1)


def sharding_axes(placements: Iterable[Placement]) -> tuple[str, ...]:
    """The axes that shard at least one of the arrays, in the order of the mesh."""
    used = {axis for placement in placements for axes in placement.axes for axis in axes}
    return tuple(axis for axis in AXES if axis in used)


def resolve(
    specs: Any, rules: AxisRules, mesh: AnyMesh, unplaced: Any = None, activation_dims: Collection[str] | None = None
) -> Any:
    """Places every array of a model.

    Args:
      specs: a tree of `ArraySpec`.
      rules: dim -> axes.
      mesh: real or abstract.
      unplaced: another tree of `ArraySpec` that is checked against the rules but not placed, such as a teacher's.
      activation_dims: dims that only activations have, as a user declares them; None for `ACTIVATION_DIMS`.

    Returns:
      The tree of `specs` with a `Placement` for each array, sharded by all rules. `Placement.gathered` derives the
      placement after a gather over the storage axes.

    Raises:
      ShardingError: lists every array with a dim that has no rule, is not divisible, or uses an axis twice;
        every rule that matches no dim; and every axis of the mesh that no rule uses.

    >>> from jax.numpy import dtype
    >>> from meshpar.mesh.layout import MeshLayout
    >>> specs = {"q": ArraySpec((512, 8, 64), dtype("float32"), ("embed", "heads", "head_dim"))}
    >>> mesh = MeshLayout(fsdp=4, tensor=2).abstract()
    >>> placed = resolve(specs, AxisRules(preset=("fsdp", "megatron")), mesh)
    >>> placed["q"].axes, placed["q"].local_shape
    ((('fsdp',), ('tensor',), ()), (128, 4, 64))
    """
    problems = Problems()
    arrays = flatten_with_paths(specs) | flatten_with_paths(unplaced)
    if not rules.preset and not rules.explicit:
        problems.add("rules", "every dim of a parameter needs a rule", "rules=replicated, or another preset")
        problems.raise_any(ShardingError, "there are no rules:")
    _check_rules(arrays, rules, mesh, problems, activation_dims)
    misfits = sum(check_array(path, spec, rules, mesh, problems) for path, spec in arrays.items())
    subject = f"{misfits} array{'s do' if misfits > 1 else ' does'}" if misfits else "the rules do"
    problems.raise_any(ShardingError, f"{subject} not fit mesh ({describe_sizes(dict(mesh.shape))}):")

    def place(_: str, spec: ArraySpec) -> Placement:
        axes = tuple(live(mesh, rules[dim]) for dim in spec.dims)
        return Placement(spec, mesh, axes, tuple(_rule(rules, dim) for dim in spec.dims))

    return map_with_path(place, specs)


def _rule(rules: AxisRules, dim: str) -> str:
    """The rule of a dim as text, with its source and how its axes are used."""
    axes = rules[dim]
    uses = {rules.use(dim, axis) for axis in axes}
    if len(uses) > 1:
        uses = {f"{rules.use(dim, axis)} over {axis}": None for axis in axes}
    return f"{dim} -> {', '.join(axes) or '[]'}   ({', '.join([rules.source(dim), *uses])})"


def _check_rules(
    arrays: dict[str, ArraySpec],
    rules: AxisRules,
    mesh: AnyMesh,
    problems: Problems,
    activation_dims: Collection[str] | None,
) -> None:
    """Adds rules that match nothing, and axes and presets without effect."""
    of_arrays = {dim for spec in arrays.values() for dim in spec.dims}
    of_activations = {*ACTIVATION_DIMS} if activation_dims is None else {"batch", *activation_dims}
    dims = of_arrays | of_activations
    for dim, axes in rules.explicit.items():
        if dim not in dims:
            near = nearest(dim, dims)
            fix = f"did you mean rules.{near}?" if near else ""
            if activation_dims is not None:
                declared = f"if only activations have it, declare it: activation_dims=[{dim}]"
                fix = f"{fix} Or, {declared}" if fix else declared
            problems.add(f"rules.{dim}", "no parameter has such a dim", fix)
        for axis in (a for a in axes if a not in AXES):
            problems.add(f"rules.{dim}", f"the mesh has no axis {axis!r}", f"its axes are {', '.join(AXES)}")
    _check_axes(dims, rules, mesh, problems)
    _check_storage(of_arrays, of_activations, rules, mesh, problems)


def _check_axes(dims: set[str], rules: AxisRules, mesh: AnyMesh, problems: Problems) -> None:
    """Adds each axis over which nothing is sharded, and each rule of a preset for an activation that no model has."""
    used = {axis for dim in dims & rules.table.keys() for axis in rules[dim]}
    for axis, size in mesh.shape.items():
        if size > 1 and axis not in used:
            lacking = [f"{dim} ({rules.source(dim)})" for dim, axes in rules.table.items() if axis in axes]
            why = f"nothing in the model has the dim {' or '.join(lacking)}" if lacking else "no rule uses this axis"
            what = f"{why}: its {size} devices would all do the same work"
            problems.add(f"mesh.{axis} = {size}", what, f"mesh.{axis}=1, or a rule or preset that uses it")
    for dim in (dim for dim in ACTIVATION_DIMS if dim not in dims and dim not in rules.explicit):
        if axes := [axis for axis in live(mesh, rules[dim]) if axis in used]:
            what = f"{rules.source(dim)} shards it over {', '.join(axes)}, and nothing in the model has this dim"
            fix = f"rules.{dim}=[]; or, if activations have it, declare it: activation_dims=[{dim}]"
            problems.add(f"rules.{dim}", what, fix)


def _check_storage(
    of_arrays: set[str], of_activations: set[str], rules: AxisRules, mesh: AnyMesh, problems: Problems
) -> None:
    """Adds a preset of ZeRO that finds no parameter to store in shards."""
    if of_arrays - rules.table.keys():
        return  # `check_array` reports dims without a rule
    storing = {dim: live(mesh, rules.storage_axes(dim)) for dim in rules.table if dim not in of_activations}
    storing = {dim: axes for dim, axes in storing.items() if axes}
    idle = [dim for dim in storing if dim not in of_arrays and dim not in rules.explicit]
    if idle and not storing.keys() & of_arrays:
        dim, axis = idle[0], storing[idle[0]][0]
        what = f"{rules.source(dim)} stores it in shards over {axis}, and no parameter has this dim"
        fix = f"rules.{LARGEST}=[{axis}] to shard the largest dim of each parameter without names, or rules=replicated"
        problems.add(f"rules.{dim}", what, fix)


def check_array(path: str, spec: ArraySpec, rules: AxisRules, mesh: AnyMesh, problems: Problems) -> bool:
    """Adds the problems of one array under its path; returns whether there are any."""
    found: list[tuple[str, str]] = []
    owner: dict[str, str] = {}
    for dim in dict.fromkeys(spec.dims):
        if dim not in rules.table:
            near = nearest(dim, set(rules.table))
            hint = f" (there is one for {near})" if near else ""
            found.append((f"no rule covers {dim}{hint}", _uncovered(dim, rules, mesh)))
    for size, dim in zip(spec.shape, spec.dims, strict=True):
        if dim not in rules.table:
            continue
        for axis in live(mesh, rules[dim]):
            if owner.setdefault(axis, dim) != dim:
                found.append((f"{owner[axis]} and {dim} are both sharded over {axis}", f"rules.{dim}=[]"))
        found += _indivisible(size, dim, spec, rules, mesh)
    for dim in {dim: None for dim in spec.dims if spec.dims.count(dim) > 1 and dim in rules.table}:
        if axes := live(mesh, rules[dim]):
            what = f"{spec.dims.count(dim)} dims are called {dim}, but only one can be sharded over {axes[0]}"
            found.append((what, f"give them different names by dims=, or rules.{dim}=[] to leave them whole"))
    for what, fix in found:
        problems.add(f"{path}  {spec}", what, fix)
    return bool(found)


def _uncovered(dim: str, rules: AxisRules, mesh: AnyMesh) -> str:
    """The fix for a dim without a rule."""
    stored = [axis for axis in live(mesh, ("fsdp",)) if axis in rules["batch"]]
    if dim == UNNAMED and stored:
        largest = f"rules.{LARGEST}=[{stored[0]}] to shard the largest dim of each parameter without names"
        return f"{largest}, or rules.{dim}=[] to leave it whole"
    return f"rules.{dim}=[] to leave it whole, or a preset"


def with_largest(specs: Any, rules: AxisRules, mesh: AnyMesh) -> Any:
    """Renames the largest dim of each array without names, of those that the axes of its rule divide, to `largest`.

    >>> from jax.numpy import dtype
    >>> from meshpar.mesh.layout import MeshLayout
    >>> spec = ArraySpec((3, 8, 16), dtype("float32"), ("unnamed", "unnamed", "unnamed"))
    >>> print(with_largest(spec, AxisRules(preset="fsdp", largest=["fsdp"]), MeshLayout(fsdp=8).abstract()))
    float32[3, 8, 16]  (unnamed, unnamed, largest)
    """
    shards = math.prod(mesh.shape[axis] for axis in live(mesh, rules.explicit.get(LARGEST, ())))
    if shards == 1 and LARGEST not in rules.explicit:
        return specs

    def rename(_: str, spec: ArraySpec) -> ArraySpec:
        fitting = [dim for dim, size in enumerate(spec.shape) if size % shards == 0]
        if not fitting or {*spec.dims} != {UNNAMED}:
            return spec
        largest = max(fitting, key=lambda dim: spec.shape[dim])
        return replace(spec, dims=tuple(LARGEST if dim == largest else UNNAMED for dim in range(len(spec.shape))))

    return map_with_path(rename, specs)


def _indivisible(size: int, dim: str, spec: ArraySpec, rules: AxisRules, mesh: AnyMesh) -> list[tuple[str, str]]:
    axes = live(mesh, rules[dim])
    shards = math.prod(mesh.shape[a] for a in axes)
    if size % shards == 0:
        return []
    what = f"{dim} = {size} is not divisible by {' x '.join(f'{a} = {mesh.shape[a]}' for a in axes)}"
    extra = spec.num_bytes - spec.num_bytes // shards
    changes = " or ".join(f"mesh.{axes[-1]}={one}" for one in _nearest_sizes(size, axes, mesh))
    fix = f"either {changes}, or rules.{dim}=[] to replicate it (at most +{human_bytes(extra)} per device)"
    return [(f"{what}    rule {_rule(rules, dim)}", fix)]


def _nearest_sizes(size: int, axes: tuple[str, ...], mesh: AnyMesh) -> list[int]:
    """Sizes of the last axis that would divide a dim of this size: the nearest below and above the current size.

    They include the nearest smaller size that also divides the number of devices.
    """
    own = mesh.shape[axes[-1]]
    others = math.prod(mesh.shape[axis] for axis in axes[:-1])
    largest = min(size, max(mesh.size, 4 * own))
    fitting = [one for one in range(2, largest + 1) if size % (others * one) == 0]
    below = [one for one in fitting if one < own]
    above = [one for one in fitting if one > own]
    on_these_devices = [one for one in below if mesh.size % one == 0]
    return sorted({*on_these_devices[-1:], *below[-1:], *above[:1]}) or [1]
