"""Models for JAX's explicit mode, where the type of each array says how it is sharded.

Such a model passes `out_sharding=P("fsdp", None, "tensor")` to JAX's functions, calls `jax.sharding.reshard`, or makes
its parameters with a sharding. JAX accepts that only under a mesh of explicit axes. So the model is called under one,
with arguments whose types say how the rules shard them, and its results have automatic axes again. What it declares is
then in the traced program, where `partition/rules/constraints.py` and XLA read it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec, explicit_axes, use_abstract_mesh

from meshpar.mesh.layout import AXES
from meshpar.mesh.varying import Axes
from meshpar.parallel.context import ParallelContext, current, tracing
from meshpar.partition.source import line_of
from meshpar.sharding.resolve import AnyMesh, live
from meshpar.sharding.spec import ArraySpec

Names = Mapping[str, str]
"""The model's own name of a mesh axis -> meshpar's."""

_REFUSALS = (
    "of type Auto or Manual",
    "can only refer to mesh axes that is of type `Explicit`",
    "Using PartitionSpec when you are not under a mesh context",
)
"""Parts of JAX's errors for a sharding that only explicit axes can follow."""


def named(mesh: AnyMesh, names: Names) -> AbstractMesh:
    """The mesh, with the model's own names of its axes."""
    called = {axis: name for name, axis in names.items()}
    mesh = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    axes = tuple(called.get(axis, axis) for axis in map(str, mesh.axis_names))
    return AbstractMesh(mesh.axis_sizes, axes, axis_types=mesh.axis_types) if called else mesh


def sharding_of(ctx: ParallelContext, spec: ArraySpec, names: Names, is_activation: bool = False) -> PartitionSpec:
    """The sharding of an argument by the rules, in the model's own names of axes."""
    called = {axis: name for name, axis in names.items()}

    def axes(dim: str) -> Axes:
        over = ctx.axes(dim) if is_activation else live(ctx.mesh, ctx.rules[dim])
        return tuple(called.get(axis, axis) for axis in over)

    return PartitionSpec(*(axes(dim) or None if dim else None for dim in spec.dims))


def shardings(arguments: Sequence[Any], specs: tuple[Any, Mapping[str, ArraySpec], Any], names: Names) -> list[Any]:
    """A tree of `PartitionSpec` for each argument of a loss: (params, batch, key[, carried])."""
    ctx = current()
    assert ctx, "only a program on a mesh has explicit axes"
    params, arrays, key, *carried = arguments
    of_params, of_batch, of_carried = specs

    def of_tree(tree: Any, specs: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        parts = [sharding_of(ctx, spec, names) for spec in jax.tree.leaves(specs)]
        # The spec of a random key has one dim more, that of its words.
        return jax.tree.unflatten(structure, [PartitionSpec(*p[: x.ndim]) for p, x in zip(parts, leaves, strict=True)])

    return [
        of_tree(params, of_params),
        {name: sharding_of(ctx, of_batch[name], names, is_activation=True) for name in arrays},
        jax.tree.map(lambda _: PartitionSpec(), key),
        *(of_tree(tree, of_carried) for tree in carried),
    ]


def call(function: Callable[..., Any], arguments: Sequence[Any], of: Callable[[], Sequence[Any]]) -> Any:
    """Calls a function of arrays with automatic axes; under explicit axes if it is written for them.

    Args:
      of: a tree of `PartitionSpec` for each argument.
    """
    try:
        return function(*arguments)
    except ValueError as error:
        mesh = jax.sharding.get_abstract_mesh()
        if not is_refusal(error) or mesh.empty:
            raise
    return explicit_axes(function, axes=mesh.axis_names, in_sharding=tuple(of()))(*arguments)


def is_refusal(error: ValueError) -> bool:
    """Whether JAX refuses a sharding because the axes of the mesh are not explicit."""
    return any(part in str(error) for part in _REFUSALS)


def initialized(init: Callable[[jax.Array], Any], names: Names) -> Callable[[jax.Array], Any]:
    """Wraps an init so that it may make arrays with a sharding of its own."""

    def made(key: jax.Array) -> Any:
        ctx = current()
        if ctx is None:
            return init(key)
        try:
            with tracing(None):  # a model is initialized on a row that no mesh divides
                return init(key)
        except ValueError as error:
            if not is_refusal(error):
                raise
        mesh = named(ctx.mesh, names)
        with use_abstract_mesh(mesh):
            return explicit_axes(init, axes=mesh.axis_names, in_sharding=PartitionSpec())(key)

    return made


def shapes(init: Callable[[jax.Array], Any], key: jax.Array, names: Names) -> Any:
    """The arrays that an init makes, as structs; their shardings are those that it gives them."""
    try:
        return jax.eval_shape(init, key)
    except ValueError as error:
        if not is_refusal(error):
            raise
    with use_abstract_mesh(of_ones(names)):  # that the rules divide the arrays is checked with those of other models
        return jax.eval_shape(init, key)


def of_ones(names: Names) -> AbstractMesh:
    """A mesh of explicit axes of one device, whose shardings divide every dim."""
    axes = tuple({axis: name for name, axis in names.items()}.get(axis, axis) for axis in AXES)
    return AbstractMesh((1,) * len(axes), axes, axis_types=(AxisType.Explicit,) * len(axes))


def typed_dims(struct: Any) -> tuple[str | None, ...]:
    """A name for each dim of an array that an init made with a sharding: the axes that shard it, joined by `+`.

    >>> typed_dims(jax.ShapeDtypeStruct((8, 8), "float32"))
    ()
    """
    spec = getattr(getattr(struct, "sharding", None), "spec", ())
    names = tuple("+".join(part) if isinstance(part, tuple) else part for part in spec)
    return names + (None,) * (struct.ndim - len(names)) if any(names) else ()


def problem(error: Exception) -> tuple[str, str] | None:
    """What is wrong with a sharding that JAX refuses, with the line of the user's code, and how to fix it."""
    found = _problem(error)
    where = line_of(error)
    return (f"{where}: {found[0]}" if where else found[0], found[1]) if found else None


def _problem(error: Exception) -> tuple[str, str] | None:
    message = str(error).partition("\n---")[0]  # what follows is about JAX's traceback
    if missing := re.search(r"Resource axis: (\w+) of .* is not found in mesh", message):
        what = f"the model is sharded over an axis {missing[1]!r}, but the mesh has {', '.join(AXES)}"
        return what, f'map it to one of these, axes={{"{missing[1]}": "tensor"}}; in a config, model.axes'
    if twice := re.search(r"has duplicate entries for `?(\w+)", message):
        return f"a sharding has the axis {twice[1]!r} for two dims", "leave one of them whole: None"
    if uneven := re.search(
        r"Sharding spec (.*) implies that array axis (\d+) is partitioned (\d+) times.* size (\d+)", message
    ):
        axes = ", ".join(re.findall(r"\w+", uneven[1]))
        what = f"a sharding cuts dim {uneven[2]}, of {uneven[4]}, into {uneven[3]} shards over {axes}"
        return what, "leave it whole, None, or give the mesh a size that divides it"
    if type(error).__name__ == "ShardingTypeError":
        fix = "declare it in the model, or let rules and model shard the same dims over the same axes"
        return f"in JAX's explicit mode {message.rstrip('.')}", fix
    if isinstance(error, ValueError) and is_refusal(error):
        return "the model declares a sharding, and there is no mesh", "call it in the loss or the init of a training"
    return None
