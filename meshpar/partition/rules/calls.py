"""Operations that contain a program: functions, recomputation, derivatives of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from meshpar.errors import ShardingError
from meshpar.mesh.varying import hidden, shown
from meshpar.parallel.data import gathering_again
from meshpar.partition.joint import joint
from meshpar.partition.layout import Layout
from meshpar.partition.plan import Placed, Scope
from meshpar.partition.program import Use
from meshpar.partition.rules.rule import Rule, signed
from meshpar.partition.streamed import streamed


def inlined(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    """A function that was only named, by `jax.jit`: its operations are planned as if they stood here."""
    inner = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "call") if key in eqn.params)
    with scope.called(eqn):
        return scope.plan(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), nodes)


def expanded(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    """What JAX, from 0.12 on, states as one operation, such as `jnp.searchsorted`: those that compute it."""
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    closed = jax.make_jaxpr(partial(eqn.primitive.to_lojax, **eqn.params))(*structs)
    with scope.called(eqn):
        return scope.plan(closed.jaxpr, closed.consts, nodes)


def remat(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    """A part of the program that the backward computes again, under the user's policy."""
    inner = Scope(scope.ctx, scope.rules, scope)
    results = inner.plan(eqn.params["jaxpr"], (), [scope.entered(inner, node) for node in nodes])
    outs = [inner.demand(inner.ready(node), inner.settled_axes(node.layout)) for node in results]
    inner.program.outputs = [Use(one.register) for one in outs]
    policy = eqn.params["policy"]
    again = jax.checkpoint(
        joint(streamed(inner.program, scope.ctx)).run,
        policy=policy and gathering_again(policy),
        prevent_cse=eqn.params["prevent_cse"],
    )
    arguments = [Use(node.register) for node in nodes if isinstance(node, Placed)]
    arguments += [Use(placed.register) for placed, _ in inner.captured]
    return scope.step(again, arguments, [one.layout for one in outs], scope.source(eqn), ((inner.program, 1),))


def placed(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    """A `device_put` that names no device: the values as they are."""
    if any(device is not None for device in eqn.params["devices"]):
        raise scope.unknown(eqn)
    return nodes


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
    # Stages, and slices that train alone, have values of their own, of which the program knows nothing.
    alone = tuple(a for a in (*scope.ctx.stage_axes, *scope.ctx.slice_axes) if a not in _named(params))
    uses, outs = [], []
    for node, spec, v in zip(nodes, params["in_specs"], inner.invars, strict=True):
        wanted = axes(spec, len(node.layout.shape))
        placed = scope.settled(node, wanted, scope.source(eqn))
        uses.append(Use(placed.register, wanted, frozenset({*v.aval.manual_axis_type.varying, *alone})))
    for v, spec, own in zip(eqn.outvars, params["out_specs"], inner.outvars, strict=True):
        over = axes(spec, v.aval.ndim)
        varies = frozenset({*own.aval.manual_axis_type.varying, *alone, *(a for dim in over for a in dim)})
        outs.append(Layout(tuple(v.aval.shape), v.aval.dtype, over, ("",) * v.aval.ndim, (), varies))
    program = jaxpr_as_fun(ClosedJaxpr(inner, ()))

    def run(*shards: jax.Array) -> list[jax.Array]:
        return [shown(y, alone) for y in program(*(hidden(x, alone) for x in shards))]

    return scope.step(run, uses, outs, scope.source(eqn))


def _named(params: Any) -> set[str]:
    """The axes that shard an argument or a result of a `shard_map`."""
    parts = [part for spec in (*params["in_specs"], *params["out_specs"]) for part in spec if part is not None]
    return {name for part in parts for name in ((part,) if isinstance(part, str) else part)}


def callback(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    what = f"{scope.source(eqn).line}: {eqn.primitive.name} calls Python from the program, once on each device's shard"
    raise ShardingError(f"{what}; call it outside of the loss, return the value as a metric, or use lowering=auto")


RULES: dict[str, Rule] = {
    "partitioned": signed(lambda eqn: eqn.params["signature"]),
    **dict.fromkeys(
        ("jit", "pjit", "closed_call", "core_call", "custom_lin", "custom_vmap_call", "composite"), inlined
    ),
    "call_hi_primitive": expanded,
    "device_put": placed,
    **dict.fromkeys(("remat2", "remat", "checkpoint"), remat),
    "optimization_barrier": barrier,
    "shard_map": region,
    **dict.fromkeys(("debug_callback", "pure_callback", "io_callback", "debug_print"), callback),
}
