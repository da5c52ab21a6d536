"""Functions with a derivative of their own: `custom_jvp`, `custom_vjp`, solutions of linear equations.

JAX differentiates the program on shards, so it would differentiate through such a function. Instead its forward and its
backward are traced with whole shapes, and each is planned as any program. On shards the function is a `custom_vjp`
again, whose two halves are these plans.

JAX differentiates no operand that the function closed over, such as a table of coefficients. These come first, and the
function on shards closes over them again.

A value that is typed as varying over an axis, and whose copies are equal there, has a gradient that is the sum of the
devices' parts: a cotangent is pending over such axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr

from meshpar.errors import ShardingError
from meshpar.mesh.varying import Axes
from meshpar.partition.layout import Layout
from meshpar.partition.plan import Placed, Scope
from meshpar.partition.program import Program, Use
from meshpar.partition.rules.calls import inlined
from meshpar.partition.rules.rule import Rule
from meshpar.partition.source import Source


def with_own_derivative(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    """A function with a derivative of its own. Within such a derivative it is a function like any other."""
    if scope.is_derivative:
        return inlined(scope, eqn, nodes)
    placed = [scope.settled(node, source=scope.source(eqn)) for node in nodes]
    ins = [one.layout for one in placed]
    traced = traced_halves(eqn, ins)
    _check_arguments(scope.source(eqn), traced)
    primal = _Half.planned(scope, traced.primal, ins)
    forward = _Half.planned(scope, traced.forward, ins)
    outs = [
        replace(one.layout, varies=one.layout.varies | again.layout.varies)
        for one, again in zip(primal.results, forward.results, strict=False)
    ]
    saved = [one.layout for one in forward.results[len(outs) :]]
    cotangents = [replace(layout, pending=_copies(scope, layout)) for layout in _floats(outs, outs)]
    backward = _Half.planned(scope, traced.backward, [*saved, *cotangents])
    primal.return_in(outs)
    forward.return_in(outs)
    given = ins[_closed_over(eqn) :]
    floats = _floats(given, given)
    backward.return_in(floats, [_copies(scope, layout) for layout in floats])
    function = _on_shards(primal.program, forward.program, backward.program, given, outs)
    uses = [Use(one.register, one.layout.axes, one.layout.varies) for one in placed]
    return scope.step(function, uses, outs, scope.source(eqn), ((primal.program, 1),))


def _check_arguments(source: Source, traced: _Traced) -> None:
    """Raises ShardingError if a half reads a value of the program around it, which no longer exists."""
    consts = (*traced.forward.consts, *traced.backward.consts)
    if any(isinstance(x, Tracer) for x in consts):
        what = f"{source.line}: the derivative of a {source.name.removesuffix('_call')} reads an array that the code"
        fix = "give it to the function as an argument, as jax.grad of jax.jit needs too"
        raise ShardingError(f"{what} around it computes; {fix}")


def linear_solve(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    """The solution of linear equations, such as `jnp.linalg.solve`, whose derivative is another solution."""
    if not scope.is_derivative:
        return with_own_derivative(scope, eqn, nodes)
    lengths = eqn.params["const_lengths"]
    solve = eqn.params["jaxprs"].solve
    before = lengths.matvec + lengths.vecmat
    consts = nodes[before : before + lengths.solve]
    right = nodes[before + lengths.solve + lengths.transpose_solve :]
    return scope.plan(solve.jaxpr, solve.consts, [*consts, *right])


def _closed_over(eqn: Any) -> int:
    """The number of operands that the function closed over; they come first."""
    return eqn.params.get("num_consts", 0)


def _copies(scope: Scope, layout: Layout) -> Axes:
    """The axes over which a value is typed as varying, though its copies are equal: its gradients there are parts.

    Stages of a pipeline, and slices that train alone, have values of their own.
    """
    return tuple(sorted(layout.varies - layout.used - {*scope.ctx.stage_axes, *scope.ctx.slice_axes}))


def _is_float(layout: Layout) -> bool:
    return jnp.issubdtype(layout.dtype, jnp.inexact)


def _floats(values: Sequence[Any], layouts: Sequence[Layout]) -> list[Any]:
    """The values that have a gradient."""
    return [x for x, layout in zip(values, layouts, strict=True) if _is_float(layout)]


@dataclass(frozen=True)
class _Half:
    """A planned half of a derivative, or the function itself."""

    scope: Scope
    results: list[Placed]

    @property
    def program(self) -> Program:
        return self.scope.program

    @classmethod
    def planned(cls, scope: Scope, closed: ClosedJaxpr, ins: Sequence[Layout]) -> _Half:
        inner = Scope(scope.ctx, scope.rules, is_derivative=True)
        results = inner.plan(closed.jaxpr, closed.consts, [inner.input(layout) for layout in ins])
        placed = [inner.settled(node) for node in results]
        inner.program.outputs = [Use(one.register) for one in placed]
        return cls(inner, placed)

    def return_in(self, layouts: Sequence[Layout], parts: Sequence[Axes] | None = None) -> None:
        """Makes the program return its first results in these layouts.

        Args:
          parts: for gradients of values in them, the axes over which each is a sum of the devices' parts.
        """
        self.program.outputs[: len(layouts)] = [
            Use(one.register, layout.axes, layout.varies, partial)
            for one, layout, partial in zip(self.results, layouts, parts or [()] * len(layouts), strict=False)
        ]


def _on_shards(
    primal: Program, forward: Program, backward: Program, given: Sequence[Layout], outs: Sequence[Layout]
) -> Callable[..., Any]:
    """The function on local shards, with its derivative.

    Args:
      given: the layouts of the operands that it does not close over.
    """

    def function(*shards: Any) -> Any:
        closed_over = shards[: len(shards) - len(given)]

        @jax.custom_vjp
        def of_given(*shards: Any) -> Any:
            return tuple(primal.run(*closed_over, *shards))

        def run_forward(*shards: Any) -> Any:
            found = forward.run(*closed_over, *shards)
            return tuple(found[: len(outs)]), found[len(outs) :]

        def run_backward(saved: Any, grads: Any) -> Any:
            found = iter(backward.run(*saved, *_floats(grads, outs)))
            return tuple(next(found) if _is_float(layout) else None for layout in given)

        of_given.defvjp(run_forward, run_backward)
        return of_given(*shards[len(closed_over) :])

    return function


@dataclass(frozen=True)
class _Traced:
    """An equation, its forward, which also returns what its backward needs, and its backward, with whole shapes."""

    primal: ClosedJaxpr
    forward: ClosedJaxpr
    backward: ClosedJaxpr


def traced_halves(eqn: Any, ins: Sequence[Any]) -> _Traced:
    """Traces the function of an equation, its forward and its backward.

    Args:
      ins: the layouts of its operands, or their types.
    """
    structs = [jax.ShapeDtypeStruct(layout.shape, layout.dtype) for layout in ins]

    def call(*arguments: Any) -> list[Any]:
        return list(eqn.primitive.bind(*arguments, **eqn.primitive.get_bind_params(eqn.params)))

    first = _closed_over(eqn)

    def differentiated(*arguments: Any) -> tuple[Any, Any, Any]:
        """(results with a gradient, their pullback, all results)."""
        closed_over, given = arguments[:first], arguments[first:]

        def of_floats(*floats: Any) -> Any:
            left = iter(floats)
            every = (next(left) if _is_float(one) else x for x, one in zip(given, ins[first:], strict=True))
            outs = call(*closed_over, *every)
            return [x for x in outs if jnp.issubdtype(x.dtype, jnp.inexact)], outs

        return jax.vjp(of_floats, *_floats(given, ins[first:]), has_aux=True)

    def forward(*arguments: Any) -> list[Any]:
        _, pullback, outs = differentiated(*arguments)
        return [*outs, *jax.tree.leaves(pullback)]

    floats_out, pullback, _ = jax.eval_shape(differentiated, *structs)
    saved, tree = jax.tree.flatten(pullback)

    def backward(*arguments: Any) -> Any:
        return jax.tree.unflatten(tree, arguments[: len(saved)])(list(arguments[len(saved) :]))

    return _Traced(
        jax.make_jaxpr(call)(*structs),
        jax.make_jaxpr(forward)(*structs),
        jax.make_jaxpr(backward)(*saved, *floats_out),
    )


RULES: dict[str, Rule] = {
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), with_own_derivative),
    "custom_linear_solve": linear_solve,
}
