"""A function of whole arrays on shards of any layout, and on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshpar import AxisRules, MeshLayout
from meshpar.mesh.varying import untyped
from meshpar.parallel.context import ParallelContext
from meshpar.partition.layout import Layout
from meshpar.partition.plan import Scope
from meshpar.partition.program import Program, Use
from meshpar.partition.rules import RULES

Axes = tuple[tuple[str, ...], ...]
SIZES = {"data": 2, "tensor": 2}


def context(**sizes: int) -> ParallelContext:
    layout = MeshLayout(**(sizes or SIZES))
    mesh = layout.build(jax.devices()[: layout.requested()])
    return ParallelContext(mesh=mesh, rules=AxisRules(preset="megatron"), manual=True, activation_dims=())


def plan(function: Callable[..., Any], arguments: Sequence[Any], axes: Sequence[Axes], ctx: ParallelContext) -> Program:
    """The plan of a function of arrays, each sharded over its axes; its results are whole."""
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments]
    with untyped(), jax.sharding.use_abstract_mesh(ctx.mesh.abstract_mesh):
        closed = jax.make_jaxpr(function)(*structs)
        scope = Scope(ctx, RULES)
        nodes = [scope.input(layout_of(x, over)) for x, over in zip(arguments, axes, strict=True)]
        outs = scope.plan(closed.jaxpr, closed.consts, nodes)
    whole = [((),) * len(node.layout.shape) for node in outs]
    scope.program.outputs = [
        Use(scope.demand(node, axes).register, axes) for node, axes in zip(outs, whole, strict=True)
    ]
    return scope.program


def layout_of(x: Any, axes: Axes) -> Layout:
    used = frozenset(axis for dim in axes for axis in dim)
    return Layout(tuple(x.shape), x.dtype, axes, ("",) * x.ndim, (), used)


def on_shards(
    function: Callable[..., Any], arguments: Sequence[Any], axes: Sequence[Axes], ctx: ParallelContext | None = None
) -> Any:
    """(results, gradients) of a function whose arguments are sharded; the gradients are those of `weighed`."""
    ctx = ctx or context()
    program = plan(function, arguments, axes, ctx)
    specs = tuple(PartitionSpec(*(over or None for over in dims)) for dims in axes)
    run = jax.shard_map(
        lambda *shards: program.run(*shards), mesh=ctx.mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=True
    )
    placed = [
        jax.device_put(jnp.array(x), NamedSharding(ctx.mesh, spec)) for x, spec in zip(arguments, specs, strict=True)
    ]
    return jax.device_get(_both(run, placed))


def on_one_device(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    return jax.device_get(_both(lambda *x: jax.tree.leaves(function(*x)), [jnp.asarray(x) for x in arguments]))


def _both(run: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    which = [i for i, x in enumerate(arguments) if jnp.issubdtype(x.dtype, jnp.floating)]

    def of_floats(*floats: Any) -> tuple[Any, Any]:
        given = list(arguments)
        for i, x in zip(which, floats, strict=True):
            given[i] = x
        results = run(*given)
        return weighed(results), results

    if not which:
        return jax.jit(run)(*arguments), ()
    grads, results = jax.jit(jax.grad(of_floats, tuple(range(len(which))), has_aux=True))(
        *(arguments[i] for i in which)
    )
    return results, grads


def weighed(results: Any) -> jax.Array:
    """One number of all results, to which each element counts differently."""
    total = jnp.zeros(())
    for x in jax.tree.leaves(results):
        if jnp.issubdtype(x.dtype, jnp.floating):
            weights = jnp.sin(1.0 + jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)
            total = total + (jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x)) * weights).sum()
    return total


def layouts(shape: tuple[int, ...], sizes: dict[str, int] = SIZES) -> Iterator[Axes]:
    """Every way to shard an array over the axes."""
    options = [(), *((axis,) for axis in sizes), tuple(sizes), tuple(reversed(sizes))]

    def choose(dim: int, left: frozenset[str]) -> Iterator[Axes]:
        if dim == len(shape):
            yield ()
            return
        for over in options:
            if {*over} <= left and shape[dim] % math.prod(sizes[axis] for axis in over) == 0:
                for rest in choose(dim + 1, left - {*over}):
                    yield (over, *rest)

    return choose(0, frozenset(sizes))


def some_layouts(arguments: Sequence[Any], number: int, seed: int = 0) -> list[tuple[Axes, ...]]:
    """Layouts of the arguments, drawn by a seed; the first leaves all whole but the first argument's first dim."""
    rng = np.random.default_rng(seed)
    choices = [list(layouts(x.shape)) for x in arguments]
    return [tuple(options[rng.integers(len(options))] for options in choices) for _ in range(number)]
