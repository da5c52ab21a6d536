"""Operations that contain a program: functions, recomputation, derivatives of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from meshpar.errors import ShardingError
from meshpar.parallel.data import gathering_again
from meshpar.partition.layout import Layout
from meshpar.partition.plan import Placed, Scope
from meshpar.partition.program import Program, Use
from meshpar.partition.rules.rule import Rule


def inlined(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    """A function that was only named, by `jax.jit`: its operations are planned as if they stood here."""
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    with scope.called(eqn):
        return scope.plan(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), nodes)


def remat(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    """A part of the program that the backward computes again, under the user's policy."""
    inner = Scope(scope.ctx, scope)
    results = inner.plan(eqn.params["jaxpr"], (), [scope.entered(inner, node) for node in nodes])
    outs = [inner.demand(inner.ready(node), inner.settled_axes(node.layout)) for node in results]
    inner.program.outputs = [Use(one.register) for one in outs]
    policy = eqn.params["policy"]
    again = jax.checkpoint(
        inner.program.run,
        policy=policy and gathering_again(policy),
        prevent_cse=eqn.params["prevent_cse"],
    )
    arguments = [Use(node.register) for node in nodes if isinstance(node, Placed)]
    arguments += [Use(placed.register) for placed, _ in inner.captured]
    return scope.step(again, arguments, [one.layout for one in outs], scope.source(eqn), ((inner.program, 1),))


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


def with_own_derivative(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    """A function with a derivative of its own, `custom_jvp` or `custom_vjp`.

    Its forward and its backward are traced with whole shapes, and each is planned: JAX differentiates the function on
    shards by calling the planned backward.
    """
    if scope.is_derivative:
        return inlined(scope, eqn, nodes)
    placed = [scope.settled(node, source=scope.source(eqn)) for node in nodes]
    layouts = [one.layout for one in placed]
    is_float = [jnp.issubdtype(layout.dtype, jnp.inexact) for layout in layouts]
    pair = _Derivative(eqn, layouts, is_float)
    primal, outs = _planned(scope, pair.primal.jaxpr, pair.primal.consts, layouts)
    out_layouts = [one.layout for one in outs]
    forward, results = _planned(scope, pair.forward.jaxpr, pair.forward.consts, layouts)
    out_layouts = [
        replace(layout, varies=layout.varies | again.layout.varies)
        for layout, again in zip(out_layouts, results, strict=False)
    ]
    for program, ends in ((primal, outs), (forward, results)):
        program.outputs[: len(out_layouts)] = [
            replace(scope.use(one, layout.axes), varies=layout.varies)
            for one, layout in zip(ends, out_layouts, strict=False)
        ]
    saved = [one.layout for one in results[len(out_layouts) :]]
    float_outs = [layout for layout in out_layouts if jnp.issubdtype(layout.dtype, jnp.inexact)]
    cotangents = [replace(layout, pending=_copies(layout)) for layout in float_outs]
    backward, gradients = _planned(scope, pair.backward.jaxpr, pair.backward.consts, [*saved, *cotangents])
    inexact = [layout for layout, floats in zip(layouts, is_float, strict=True) if floats]
    backward.outputs = [
        Use(one.register, layout.axes, layout.varies, _copies(layout))
        for one, layout in zip(gradients, inexact, strict=True)
    ]

    @jax.custom_vjp
    def function(*shards: Any) -> Any:
        return tuple(primal.run(*shards))

    def run_forward(*shards: Any) -> Any:
        found = forward.run(*shards)
        return tuple(found[: len(out_layouts)]), found[len(out_layouts) :]

    def run_backward(saved: Any, grads: Any) -> Any:
        given = [
            grad for grad, layout in zip(grads, out_layouts, strict=True) if jnp.issubdtype(layout.dtype, jnp.inexact)
        ]
        found = iter(backward.run(*saved, *given))
        return tuple(next(found) if floats else None for floats in is_float)

    function.defvjp(run_forward, run_backward)
    uses = [Use(one.register, one.layout.axes, one.layout.varies) for one in placed]
    return scope.step(function, uses, out_layouts, scope.source(eqn), ((primal, 1),))


def _copies(layout: Layout) -> tuple[str, ...]:
    """The axes over which a value is typed as varying, though its copies are equal: its gradients there are parts."""
    return tuple(sorted(layout.varies - layout.used))


def _planned(scope: Scope, jaxpr: Any, consts: Any, layouts: Sequence[Layout]) -> tuple[Program, list[Placed]]:
    inner = Scope(scope.ctx, is_derivative=True)
    results = inner.plan(jaxpr, consts, [inner.input(layout) for layout in layouts])
    outs = [inner.settled(node) for node in results]
    inner.program.outputs = [Use(one.register) for one in outs]
    return inner.program, outs


class _Derivative:
    """An equation, its forward, which also returns what its backward needs, and the backward, as jaxprs."""

    def __init__(self, eqn: Any, layouts: Sequence[Layout], is_float: Sequence[bool]) -> None:
        structs = [jax.ShapeDtypeStruct(layout.shape, layout.dtype) for layout in layouts]
        saved: list[Any] = []

        def call(*arguments: Any) -> Any:
            results = eqn.primitive.bind(*arguments, **eqn.primitive.get_bind_params(eqn.params))
            return list(results)

        def forward(*arguments: Any) -> Any:
            floats = [x for x, flag in zip(arguments, is_float, strict=True) if flag]

            def of_floats(*floats: Any) -> Any:
                given = iter(floats)
                outs = call(*(next(given) if flag else x for x, flag in zip(arguments, is_float, strict=True)))
                return [x for x in outs if jnp.issubdtype(x.dtype, jnp.inexact)], outs

            floats_out, pullback, outs = jax.vjp(of_floats, *floats, has_aux=True)
            leaves, tree = jax.tree.flatten(pullback)
            saved[:] = [tree, [jax.typeof(x) for x in leaves], [jax.typeof(x) for x in floats_out]]
            return [*outs, *leaves]

        self.primal = jax.make_jaxpr(call)(*structs)
        self.forward = jax.make_jaxpr(forward)(*structs)
        tree, leaves, floats_out = saved

        def backward(*arguments: Any) -> Any:
            pullback = jax.tree.unflatten(tree, arguments[: len(leaves)])
            return pullback(list(arguments[len(leaves) :]))

        def struct(aval: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

        self.backward = jax.make_jaxpr(backward)(*map(struct, [*leaves, *floats_out]))


def barrier(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    """An `optimization_barrier`: the values as they are."""
    placed = [scope.settled(node, source=scope.source(eqn)) for node in nodes]
    uses = [Use(one.register) for one in placed]
    return scope.step(jax.lax.optimization_barrier_p.bind, uses, [one.layout for one in placed], scope.source(eqn))


def region(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    """A `shard_map` of the user's own: its program computes shards already."""
    params = eqn.params
    if left := {*map(str, params["newly_manual_axes"])} ^ {*scope.sizes}:
        what = f"a shard_map that leaves axes to the compiler ({', '.join(sorted(left))})"
        raise ShardingError(f"{scope.source(eqn).line}: {what}; name all axes of the mesh, or use lowering=auto")

    def axes(spec: Any, ndim: int) -> tuple[tuple[str, ...], ...]:
        parts = [*spec, *[None] * (ndim - len(spec))]
        names = [() if part is None else (part,) if isinstance(part, str) else tuple(part) for part in parts]
        return tuple(tuple(name for name in dim if scope.sizes[name] > 1) for dim in names)

    inner = params["jaxpr"]
    uses, outs = [], []
    for node, spec, v in zip(nodes, params["in_specs"], inner.invars, strict=True):
        wanted = axes(spec, len(node.layout.shape))
        placed = scope.settled(node, wanted, scope.source(eqn))
        uses.append(Use(placed.register, wanted, frozenset(v.aval.manual_axis_type.varying)))
    for v, spec, own in zip(eqn.outvars, params["out_specs"], inner.outvars, strict=True):
        over = axes(spec, v.aval.ndim)
        varies = frozenset(own.aval.manual_axis_type.varying) | {a for dim in over for a in dim}
        outs.append(Layout(tuple(v.aval.shape), v.aval.dtype, over, ("",) * v.aval.ndim, (), varies))
    run = jaxpr_as_fun(ClosedJaxpr(inner, ()))
    return scope.step(run, uses, outs, scope.source(eqn))


def callback(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    what = f"{scope.source(eqn).line}: {eqn.primitive.name} calls Python from the program, once on each device's shard"
    raise ShardingError(f"{what}; call it outside of the loss, return the value as a metric, or use lowering=auto")


RULES: dict[str, Rule] = {
    **dict.fromkeys(("jit", "pjit", "closed_call", "core_call", "custom_lin"), inlined),
    **dict.fromkeys(("remat2", "remat", "checkpoint"), remat),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), with_own_derivative),
    "custom_linear_solve": linear_solve,
    "optimization_barrier": barrier,
    "shard_map": region,
    **dict.fromkeys(("debug_callback", "pure_callback", "io_callback", "debug_print"), callback),
}
