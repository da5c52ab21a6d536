"""The arrays of a user's model: the specs of its parameters and of what its forward changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.errors import ConfigError, Problems, suggestion
from meshpar.interop import explicit
from meshpar.interop.declared import changing, declared_dims, lazily, unboxed
from meshpar.interop.keys import KEY_DATA, as_data, key_implementations
from meshpar.interop.losses import explained
from meshpar.mesh.layout import AXES
from meshpar.sharding.rules import UNNAMED, AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.tree import flatten_with_paths, map_with_path, matching

Dims = Mapping[str, Sequence[str | None]]
Init = Callable[[jax.Array], Any]


class UserSpecs(NamedTuple):
    """Trees of `ArraySpec` of a model's parameters and of its carried state.

    Args:
      keys: the generators of the carried state's random keys, see `key_implementations`.
    """

    specs: Any
    carried: Any
    keys: dict[str, Any]


def check_names(**arguments: Dims | None) -> list[dict[str, tuple[str, ...]]]:
    """The arguments `dims` and `batch_dims` of `training`, in which None, the name of a dim without one, becomes "".

    Raises:
      ConfigError: an argument is no mapping, or one of its values is no sequence of names.
    """
    problems = Problems()
    checked = []
    for argument, given in arguments.items():
        given = {} if given is None else given
        if not isinstance(given, Mapping):
            what = f"is {given!r}, and each array has names of its own"
            problems.add(argument, what, f"{argument}={{'x': ('batch', 'embed')}}")
            continue
        names = {array: _names(one) for array, one in given.items()}
        for array in (array for array, one in names.items() if one is None):
            what = f"is {given[array]!r}, and not a name for each dim"
            problems.add(f"{argument}[{array!r}]", what, "a tuple of names, with None for a dim without one")
        checked.append(names)
    problems.raise_any(ConfigError, "these arguments of training are wrong:")
    return checked


def _names(given: Any) -> tuple[str, ...] | None:
    if isinstance(given, str) or not isinstance(given, Sequence):
        return None
    names = tuple("" if name is None else name for name in given)
    return names if all(isinstance(name, str) for name in names) else None


def specs_of(
    init: Init, carried: Init | None, seed: int, dims: Dims, axes: Mapping[str, str] | None = None
) -> UserSpecs:
    """The arrays of a user's model, see `training`.

    Raises:
      ConfigError: a glob matches nothing, or `init` returns arrays that no optimizer can train.
    """
    problems = Problems()
    first = jax.random.key(seed)
    with explained():
        params = explicit.shapes(lazily(init), first, axes or {})
    _check_trainable(params, problems)
    problems.raise_any(ConfigError, "an optimizer cannot train these arrays:")
    specs = _specs(params, dims, problems)
    state = explicit.shapes(lazily(carried), first, axes or {}) if carried else {}
    carried_specs = _specs(state, dims, problems)
    paths = [path.removesuffix(".value") for path in (*flatten_with_paths(specs), *flatten_with_paths(carried_specs))]
    for glob in dims:
        if not matching(paths, glob):
            fix = suggestion(glob, paths, f"the arrays are {', '.join(paths[:8])}")
            what = "matches no array" + ("; the wildcards are * and **" if {*glob} & {*"[]?{}"} else "")
            problems.add(f"dims[{glob!r}]", what, fix)
    problems.raise_any(ConfigError, "the names of dims do not fit the model:")
    return UserSpecs(specs, carried_specs, key_implementations(state))


def _specs(tree: Any, dims: Dims, problems: Problems) -> Any:
    keys = key_implementations(tree)
    boxed = jax.eval_shape(as_data, tree)
    declared = declared_dims(boxed)

    def spec(path: str, struct: jax.ShapeDtypeStruct) -> ArraySpec:
        key_dims = (KEY_DATA,) if path in keys else ()
        num_dims = struct.ndim - len(key_dims)
        path = path.removesuffix(".value")  # of an NNX variable
        given = next((names for glob, names in dims.items() if matching([path], glob)), declared.get(path))
        names = tuple(name or UNNAMED for name in given or (None,) * num_dims)
        if len(names) != num_dims:
            shape = f"{struct.dtype}{list(struct.shape)}"
            problems.add(f"{path}  {shape}", f"has {len(names)} names: {', '.join(names)}", "a name for each dim")
            names = (UNNAMED,) * num_dims
        return ArraySpec(struct.shape, np.dtype(struct.dtype), names + key_dims)

    return map_with_path(spec, unboxed(boxed))


def _check_trainable(params: Any, problems: Problems) -> None:
    """Reports arrays that an optimizer cannot train: NNX state, integers, batch statistics."""
    fix = "init: nnx.state(model, nnx.Param); carried: nnx.state(model, nnx.Not(nnx.Param))"
    kinds = changing(params)
    for path, kind in kinds.items():
        problems.add(path, f"is {kind} of NNX, which the forward changes", fix)
    for path, struct in flatten_with_paths(params).items():
        of_nnx = path.removesuffix(".value") in kinds
        if not of_nnx and not jnp.issubdtype(struct.dtype, jnp.inexact):
            what = f"is {struct.dtype}{list(struct.shape)}, which has no gradient"
            problems.add(path, what, "let the loss close over it, or pass it as `carried`")
        elif path.startswith("batch_stats."):
            what = "is a batch statistic, which the forward changes"
            problems.add(path, what, 'init: model.init(...)["params"]; carried: {"batch_stats": ...}')


def arrays_of(init: Init, axes: Mapping[str, str] | None = None) -> Init:
    """Wraps `init` so that its result has no Linen boxes, and random keys are integers."""
    return explicit.initialized(lambda key: as_data(unboxed(lazily(init)(key))), axes or {})


def with_axes(rules: AxisRules, axes: Mapping[str, str], trees: Any) -> AxisRules:
    """Adds a rule for each dim that is named by the mesh axes that shard it, as in `PartitionSpec("fsdp", "tp")`."""
    known = {axis: axis for axis in AXES} | {**axes}
    dims = {dim for spec in jax.tree.leaves(trees) for dim in spec.dims if dim not in rules.table}
    parts = {dim: dim.split("+") for dim in dims}
    extra = {dim: tuple(known[name] for name in names) for dim, names in parts.items() if {*names} <= {*known}}
    return rules | AxisRules(**extra) if extra else rules  # pyright: ignore


def check_axes(axes: Mapping[str, str]) -> None:
    """Checks the argument `axes` of `training`."""
    problems = Problems()
    for name, axis in axes.items():
        if axis not in AXES or list(axes.values()).count(axis) > 1:
            what = "has two names" if axis in AXES else "is not an axis of a mesh"
            problems.add(f"axes: {name}", f"{axis} {what}", f"use each of {', '.join(AXES)} at most once")
    problems.raise_any(ConfigError, "the model's names of axes are wrong:")
