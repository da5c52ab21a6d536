"""Turns a loss of whole arrays, of any model, into one of local shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from meshpar.errors import ConfigError, Problems, ShardingError
from meshpar.mesh.varying import Axes, untyped, varies_over
from meshpar.parallel.batch import Batch
from meshpar.parallel.context import ParallelContext, current, manual, tracing
from meshpar.parallel.precision import is_mixed
from meshpar.partition.in_loops import made_in_loops
from meshpar.partition.layout import Layout, count
from meshpar.partition.moved_values import check_declared, moved_values
from meshpar.partition.plan import Placed, Scope
from meshpar.partition.program import Program, Use
from meshpar.partition.rules import RULES
from meshpar.partition.rules.quantized import UNROUNDED
from meshpar.partition.segments import differentiable
from meshpar.partition.streamed import streams
from meshpar.sharding.resolve import live
from meshpar.sharding.spec import ArraySpec

WholeLoss = Callable[[Any, Batch, Any, Any], Any]
"""(params, batch, key, carried) -> `LossSums`, of whole arrays."""
Rewrite = Callable[[ClosedJaxpr], ClosedJaxpr]


@dataclass(frozen=True)
class PartitionedLoss:
    """A loss of whole arrays as one of local shards in the manual lowering; under GSPMD the loss itself.

    It is traced with whole shapes, and planned and evaluated on shards inside the step's `shard_map`. So JAX
    differentiates the local program, and its types prove that no sum is missing.

    Args:
      loss: the user's.
      params, carried: trees of `ArraySpec`.
      batch: name -> `ArraySpec`.
      rewrite: replaces operations of the traced program before it is planned.
      copies: keys of the carried state under which there are copies of the parameters, stored as these are.
    """

    loss: WholeLoss
    params: Any
    batch: dict[str, ArraySpec]
    carried: Any
    rewrite: Rewrite = lambda closed: closed
    copies: tuple[str, ...] = ()

    def __call__(self, params: Any, batch: Batch, key: Any, carried: Any) -> Any:
        ctx = manual() or _rounding_alone()
        if ctx is None:
            return self.loss(params, batch, key, carried)
        arguments = (params, batch, key, carried)
        leaves, tree = jax.tree.flatten(arguments, is_leaf=is_mixed)
        layouts = self.layouts(ctx, arguments)
        program, result = planned(self.loss, layouts, tree, ctx, self.rewrite)
        return jax.tree.unflatten(result, differentiable(program, ctx)(*leaves))

    def plan(self, ctx: ParallelContext, structs: tuple[Any, Any, Any, Any]) -> Program:
        """The plan for arguments of these global shapes, without a device."""
        layouts = self.layouts(ctx, structs, are_local=False)
        return planned(self.loss, layouts, jax.tree.structure(structs), ctx, self.rewrite)[0]

    def layouts(self, ctx: ParallelContext, arguments: Any, are_local: bool = True) -> list[Layout]:
        """The layout of each leaf of the arguments of a loss, by their specs."""
        params, batch, key, carried = arguments
        specs = self.batch | {"rows": ArraySpec((0,), np.dtype("int32"), ("batch",))}

        def of(x: Any, dims: tuple[str, ...], kind: Any) -> Layout:
            return kind(ctx, x, dims, are_local)

        return [
            *(of(x, spec.dims, parameter_layout) for x, spec in _pairs(params, self.params)),
            *(of(batch[name], specs[name].dims, _activation) for name in sorted(batch)),
            *(Layout.whole(x.shape, x.dtype) for x in jax.tree.leaves(key)),
            *self.state_layouts(ctx, carried, are_local),
        ]

    def state_layouts(self, ctx: ParallelContext, carried: Any, are_local: bool = True) -> list[Layout]:
        """The layout of each leaf of the carried state."""
        if not self.copies:
            return [_state(ctx, x, spec.dims, are_local) for x, spec in _pairs(carried, self.carried)]
        return [
            (parameter_layout if key in self.copies else _state)(ctx, x, spec.dims, are_local)
            for key in sorted(carried)
            for x, spec in _pairs(carried[key], self.carried[key])
        ]


def _rounding_alone() -> ParallelContext | None:
    """The context of one device, if its program multiplies in 8 bits too, as those of meshes do."""
    ctx = current()
    return ctx if ctx and ctx.number_format and ctx.mesh.size == 1 else None


def planned(
    loss: WholeLoss, layouts: list[Layout], tree: Any, ctx: ParallelContext, rewrite: Rewrite
) -> tuple[Program, Any]:
    """Traces a loss with whole shapes and plans it: the program, and the structure of its result."""
    structs = [jax.ShapeDtypeStruct(layout.shape, layout.dtype) for layout in layouts]
    with of_whole_arrays(ctx):
        closed, shapes = traced(loss, structs, tree)
        closed = made_in_loops(rewrite(closed), tree.children()[0].num_leaves)
        scope = Scope(ctx, RULES)
        nodes = scope.plan(closed.jaxpr, closed.consts, [scope.input(layout) for layout in layouts])
    if ctx.number_format and not scope.in_8_bits:
        what = f"{ctx.number_format}: no product of the loss has an activation and a parameter as its operands"
        whole = f"convolutions, and weights with a dim {', '.join(sorted(UNROUNDED))}, are computed unrounded"
        raise ConfigError(f"{what} ({whole}); remove number_format")
    num_carried = len(jax.tree.leaves(shapes.carried))
    num_sums = len(nodes) - num_carried
    carried = [layout.axes for layout in layouts[len(layouts) - num_carried :]]
    scope.program.outputs = [
        returned(scope, nodes[0], (), ctx.loss_axes),  # each device differentiates its part of the loss
        *(whole_or_parts(scope, node) for node in nodes[1:num_sums]),
        *(_state_returned(scope, node, axes) for node, axes in zip(nodes[num_sums:], carried, strict=True)),
    ]
    _check_overlaps(scope)
    if ctx.strict:
        check_declared(moved_values(scope.program, ctx.axes("residual_seq")))
    return scope.program, jax.tree.structure(shapes)


def _check_overlaps(scope: Scope) -> None:
    """Raises ConfigError for an overlap that no product of a loss has, on a mesh with its axes."""
    ctx, problems = scope.ctx, Problems()
    stores = ctx.gathers_in_layers and any(ctx.storage(dim) for dim in ctx.rules.table if dim != "batch")
    if ctx.parallel.fsdp.in_chunks and stores and not scope.in_chunks:
        what = "no product of the loss is the only one to read a parameter of which one dim is stored in shards"
        problems.add("parallel.fsdp.overlap", what, "parallel.fsdp.overlap=none")
    over = ", ".join(ctx.axes("residual_seq"))
    if ctx.parallel.tensor.overlap != "none" and over and not streams(scope.program, ctx):
        what = f"no product of the loss gathers its input, or scatters its result, over {over}"
        problems.add("parallel.tensor.overlap", what, "parallel.tensor.overlap=none; explain --activations lists moves")
    problems.raise_any(ConfigError, "these overlaps have no effect:")


@contextmanager
def of_whole_arrays(ctx: ParallelContext) -> Iterator[None]:
    """Traces and plans what is in the `with` block as a program of whole arrays, also inside a `shard_map`."""
    mesh = ctx.mesh.abstract_mesh if isinstance(ctx.mesh, Mesh) else ctx.mesh
    with untyped(), jax.sharding.use_abstract_mesh(mesh), tracing(replace(ctx, manual=False, is_planned=True)):
        yield


def traced(loss: WholeLoss, structs: Sequence[Any], tree: Any) -> tuple[Any, Any]:
    """The jaxpr of a loss of the leaves of `tree`, and the structure of its result."""

    def flat(*leaves: Any) -> Any:
        return loss(*jax.tree.unflatten(tree, leaves))

    return jax.make_jaxpr(flat, return_shape=True)(*structs)


def returned(scope: Scope, node: Any, axes: tuple[Axes, ...], partial: Axes = ()) -> Use:
    """A result: sharded over `axes`, a sum of the devices' parts over `partial`, and the same over all other axes.

    Slices that train alone have results of their own.
    """
    placed = scope.demand(scope.ready(node), axes)
    sharding = {axis for dim in axes for axis in dim}
    return Use(placed.register, axes, frozenset({*sharding, *partial, *scope.ctx.slice_axes}), partial)


def _state_returned(scope: Scope, node: Any, axes: tuple[Axes, ...]) -> Use:
    """Carried state as a result. A copy of a parameter stays stored, as nothing changed it."""
    return Use(node.register) if isinstance(node, Placed) and node.layout.stored else returned(scope, node, axes)


def whole_or_parts(scope: Scope, node: Any) -> Use:
    """A number that is not differentiated: the devices' parts of a sum that is pending over axes of the loss."""
    pending = scope.ready(node).layout.pending
    return returned(scope, node, (), tuple(axis for axis in scope.ctx.loss_axes if axis in pending))


def _pairs(tree: Any, specs: Any) -> list[tuple[Any, ArraySpec]]:
    return list(zip(jax.tree.leaves(tree, is_leaf=is_mixed), jax.tree.leaves(specs), strict=True))


def parameter_layout(ctx: ParallelContext, x: Any, dims: tuple[str, ...], is_local: bool) -> Layout:
    """A parameter: stored in shards where layers gather it; sharded by its partition rules."""
    stored = tuple((i, ctx.storage(dim)) for i, dim in enumerate(dims) if ctx.storage(dim))
    for dim in dims:
        _check_order(dim, ctx)
    stored = stored if ctx.gathers_in_layers else ()
    axes = tuple(ctx.axes(dim) + ctx.dispatch(dim) for dim in dims)
    array = x.stored if is_mixed(x) else x
    factors = [
        count(over, ctx.mesh.shape) * count(dict(stored).get(i, ()), ctx.mesh.shape) for i, over in enumerate(axes)
    ]
    shape = tuple(size * (n if is_local else 1) for size, n in zip(array.shape, factors, strict=True))
    is_cast = bool(stored) and jnp.issubdtype(array.dtype, jnp.floating)  # where it is gathered
    dtype = np.dtype(ctx.compute_dtype or array.dtype) if is_cast else array.dtype
    varies = varies_over(array) if is_local else frozenset(ctx.gradient_axes) | {a for over in axes for a in over}
    return Layout(shape, dtype, axes, dims, (), varies, any(axes), True, stored)


def _check_order(dim: str, ctx: ParallelContext) -> None:
    """A gather over the slower of two axes would put a dim's parts in another order."""
    axes = live(ctx.mesh, ctx.rules[dim])
    stored = ctx.storage(dim)
    if stored and axes[len(axes) - len(stored) :] != stored:
        inner = (*(axis for axis in axes if axis not in stored), *stored)
        what = f"rules.{dim}=[{', '.join(axes)}]: {', '.join(stored)} stores shards, which are gathered before use"
        raise ShardingError(f"{what}, so it comes after axes that do not; rules.{dim}=[{', '.join(inner)}]")


def _activation(ctx: ParallelContext, x: Any, dims: tuple[str, ...], is_local: bool) -> Layout:
    return sharded_layout(ctx, x, dims, tuple((dim and ctx.axes(dim)) or () for dim in dims), is_local)


def _state(ctx: ParallelContext, x: Any, dims: tuple[str, ...], is_local: bool) -> Layout:
    return sharded_layout(ctx, x, dims, tuple(live(ctx.mesh, ctx.rules[dim]) for dim in dims), is_local)


def sharded_layout(ctx: ParallelContext, x: Any, dims: tuple[str, ...], axes: Any, is_local: bool) -> Layout:
    shape = tuple(
        size * (count(over, ctx.mesh.shape) if is_local else 1) for size, over in zip(x.shape, axes, strict=True)
    )
    varies = varies_over(x) if is_local else frozenset(a for over in axes for a in over)
    return Layout(shape, x.dtype, axes, dims, (), varies)
