"""Turns any function of parameters and whole arrays, such as a forward that generates, into one of local shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from meshpar.mesh.varying import Axes, untyped
from meshpar.parallel.context import ParallelContext, manual, tracing
from meshpar.partition.layout import Layout
from meshpar.partition.loss import parameter_layout, returned, sharded_layout
from meshpar.partition.plan import Scope
from meshpar.partition.rules import RULES

Sharding = tuple[Axes, ...]
"""The axes that shard each dim of an array."""


@dataclass(frozen=True)
class PartitionedFunction:
    """A function of whole arrays as one of local shards in the manual lowering; under GSPMD the function itself.

    Args:
      function: (params, *arrays) -> results.
      params: tree of `ArraySpec`.
      arrays: how each leaf of `arrays` is sharded.
      results: how each leaf of the results is sharded.
    """

    function: Callable[..., Any]
    params: Any
    arrays: Sequence[Sharding]
    results: Sequence[Sharding]

    def __call__(self, params: Any, *arrays: Any) -> Any:
        ctx = manual()
        if ctx is None:
            return self.function(params, *arrays)
        leaves = jax.tree.leaves((params, arrays))
        scope, nodes, result = self._planned(ctx, params, arrays, is_local=True)
        scope.program.outputs = [returned(scope, node, axes) for node, axes in zip(nodes, self.results, strict=True)]
        return jax.tree.unflatten(result, scope.program.run(*leaves))

    def natural(self, ctx: ParallelContext, params: Any, *arrays: Any) -> Any:
        """How each result would be sharded if nothing asked for another sharding: a tree of `Sharding`.

        Args:
          params, arrays: global shapes.
        """
        scope, nodes, result = self._planned(ctx, params, arrays, is_local=False)
        return jax.tree.unflatten(result, [scope.settled_axes(node.layout) for node in nodes])

    def _planned(self, ctx: ParallelContext, params: Any, arrays: Any, is_local: bool) -> tuple[Scope, list[Any], Any]:
        """The plan, the nodes of the results, and their structure."""
        leaves, tree = jax.tree.flatten((params, arrays))
        layouts = self._layouts(ctx, leaves, is_local)
        structs = [jax.ShapeDtypeStruct(layout.shape, layout.dtype) for layout in layouts]
        mesh = ctx.mesh.abstract_mesh if isinstance(ctx.mesh, Mesh) else ctx.mesh

        def flat(*leaves: Any) -> Any:
            params, arrays = jax.tree.unflatten(tree, leaves)
            return self.function(params, *arrays)

        with untyped(), jax.sharding.use_abstract_mesh(mesh), tracing(replace(ctx, manual=False, is_planned=True)):
            closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*structs)
            scope = Scope(ctx, RULES)
            nodes = scope.plan(closed.jaxpr, closed.consts, [scope.input(layout) for layout in layouts])
        return scope, nodes, jax.tree.structure(shapes)

    def _layouts(self, ctx: ParallelContext, leaves: Sequence[Any], is_local: bool) -> list[Layout]:
        specs = jax.tree.leaves(self.params)
        arrays = zip(leaves[len(specs) :], self.arrays, strict=True)
        return [
            *(parameter_layout(ctx, x, spec.dims, is_local) for x, spec in zip(leaves, specs, strict=False)),
            *(sharded_layout(ctx, x, ("",) * x.ndim, axes, is_local) for x, axes in arrays),
        ]
