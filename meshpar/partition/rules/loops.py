"""Loops and branches.

What a loop carries has one layout in all iterations: the body is planned until it returns what it gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params

from meshpar.mesh.varying import Axes
from meshpar.parallel.context import platform
from meshpar.parallel.xla import is_unrolled
from meshpar.partition.layout import Layout
from meshpar.partition.plan import Deferred, Placed, Scope
from meshpar.partition.program import Use
from meshpar.partition.rules.rule import Rule
from meshpar.partition.segments import differentiable
from meshpar.partition.source import Source

REMAT = {"remat2", "remat", "checkpoint"}
ROUNDS = 4
"""How often a body is planned with the layouts that it returned; then its results move to those that it got."""


@dataclass(frozen=True)
class Body:
    """A planned body and its results. Its arguments are those that were given, then those that it captured."""

    scope: Scope
    outs: list[Any]

    def run(self, *shards: Any) -> list[Any]:
        return self.scope.program.run(*shards)

    def returning(self, layouts: Sequence[Layout], *more: Placed) -> None:
        """Makes the body return its first results in these layouts, and `more` as they are."""
        uses = [used_as(self.scope, node, layout) for node, layout in zip(self.outs, layouts, strict=False)]
        self.scope.program.outputs = uses + [Use(one.register) for one in more]


def used_as(scope: Scope, node: Any, layout: Layout) -> Use:
    placed = scope.demand(scope.ready(node), layout.axes)
    return replace(scope.use(placed, layout.axes), varies=layout.varies)


def _body(scope: Scope, closed: Any, layouts: Sequence[Any]) -> Body:
    """Plans a body for arguments with these layouts; a node that is deferred stays so."""
    inner = Scope(scope.ctx, scope.rules, scope)
    nodes = [scope.entered(inner, x) if isinstance(x, Deferred) else inner.input(x) for x in layouts]
    return Body(inner, inner.plan(closed.jaxpr, closed.consts, nodes))


def carried_layout(scope: Scope, node: Any) -> Layout:
    """The layout in which a loop starts to carry a value: without pending sums."""
    node = scope.ready(node)
    axes = scope.settled_axes(node.layout) if isinstance(node, Placed) else ((),) * len(node.layout.shape)
    left = node.layout.varies - node.layout.used - {*node.layout.pending}
    varies = left | {a for dim in axes for a in dim}
    return replace(node.layout, axes=axes, pending=(), varies=varies, is_pinned=False, is_weight=False)


def _next(body: Body, carried: Sequence[Layout], keeps_axes: bool) -> list[Layout]:
    """The layouts that the body returns for what it carries."""
    layouts = []
    for node, before in zip(body.outs, carried, strict=False):
        returned = body.scope.ready(node).layout
        axes = before.axes if keeps_axes or isinstance(node, Deferred) else body.scope.settled_axes(returned)
        placed = body.scope.demand(body.scope.ready(node), axes)
        use = body.scope.use(placed, axes)
        names = tuple(a if a == b else "" for a, b in zip(before.names, returned.names, strict=True))
        names = returned.names if keeps_axes is False and not any(before.names) else names
        layouts.append(replace(before, axes=axes, varies=before.varies | use.varies, names=names))
    return layouts


def planned_body(
    scope: Scope, closed: Any, before: Sequence[Any], carried: list[Layout], after: Sequence[Any]
) -> tuple[Body, list[Layout]]:
    """Plans a body until what it carries has the same layout before and after."""
    for round_ in range(8 * ROUNDS):
        mark = scope.mark()
        body = _body(scope, closed, [*before, *carried, *after])
        found = _next(body, carried, keeps_axes=round_ >= ROUNDS)
        if [(x.axes, x.varies) for x in found] == [(x.axes, x.varies) for x in carried]:
            return body, found
        carried = found
        scope.reset(mark)
    raise AssertionError("the layouts that a loop carries did not settle")


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carried values of a scan; jax 0.12 has them in a tree of its arguments."""
    if "ft_in" not in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def with_consts(params: Mapping[str, Any], num: int) -> dict[str, Any]:
    """The parameters of a scan that has this number of constants; in jax 0.12 their tree is that of another scan."""
    if "ft_in" not in params:
        return {**params, "num_consts": num}

    def other(consts: list[Any]) -> Any:
        return lax.scan(lambda carry, _: (carry + sum(consts), None), 0.0, length=1)

    (traced,) = jax.make_jaxpr(other)([0.0] * num).eqns
    consts, *_ = traced.params["ft_in"].unpack()
    _, *rest = params["ft_in"].unpack()
    return {**params, "ft_in": type(params["ft_in"])(consts, *rest)}


def scan(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    """A loop over layers or time. Parameters that it scans are gathered inside, those of all iterations before it."""
    params = eqn.params
    num_consts, num_carry = scan_counts(params)
    consts = [_constant(scope, node, scope.source(eqn)) for node in nodes[:num_consts]]
    starts = nodes[num_consts : num_consts + num_carry]
    scanned = [_Scanned(scope, node, scope.source(eqn)) for node in nodes[num_consts + num_carry :]]
    before = [x if isinstance(x, Deferred) else x.layout for x in consts]
    body, carried = planned_body(
        scope, params["jaxpr"], before, [carried_layout(scope, x) for x in starts], [x.layout for x in scanned]
    )
    results = [body.scope.settled(node, source=scope.source(eqn)) for node in body.outs[num_carry:]]
    body.returning(carried, *results)
    arguments = [Use(one.register) for one in consts if isinstance(one, Placed)]
    arguments += [Use(placed.register) for placed, _ in body.scope.captured]
    num_fixed = len(arguments)
    arguments += [used_as(scope, node, layout) for node, layout in zip(starts, carried, strict=True)]
    arguments += [x.use for x in scanned]
    program = body.scope.program
    run = program.run if scope.is_derivative else differentiable(program, scope.ctx)
    num_given = sum(isinstance(one, Placed) for one in consts)
    weights = sum(math.prod(one.layout.shape) for one in scanned)
    unrolled = _is_unrolled(params, weights, platform())

    def compute(*shards: Any) -> list[Any]:
        fixed = shards[:num_fixed]

        def iterate(carry: Any, xs: Any) -> Any:
            found = run(*fixed[:num_given], *carry, *xs, *fixed[num_given:])
            return found[:num_carry], found[num_carry:]

        start = list(shards[num_fixed : num_fixed + num_carry])
        rows = list(shards[num_fixed + num_carry :])
        if unrolled:
            last, stacked = _in_order(iterate, start, rows, params["length"], params["reverse"])
        else:
            last, stacked = lax.scan(
                iterate, start, rows, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
            )
        return [*last, *stacked]

    stacks = [_stacked(one.layout, params["length"]) for one in results]
    return scope.step(
        compute, arguments, [*carried, *stacks], scope.source(eqn), ((body.scope.program, params["length"]),)
    )


def unrolls(jaxpr: Any, on: str | None) -> bool:
    """Whether a program has a loop over layers that it computes without a loop on this platform."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            sizes = [v.aval.size // eqn.params["length"] for v in eqn.invars[sum(scan_counts(eqn.params)) :]]
            if _is_unrolled(eqn.params, sum(sizes), on):
                return True
        elif any(unrolls(inner, on) for inner in jaxprs_in_params(eqn.params)):
            return True
    return False


def _is_unrolled(params: Mapping[str, Any], weights: int, on: str | None) -> bool:
    recomputes = any(eqn.primitive.name in REMAT for eqn in params["jaxpr"].eqns)
    if params["unroll"] > 1:
        return params["unroll"] >= params["length"]
    return is_unrolled(on, weights, params["length"], recomputes)


def _in_order(iterate: Callable[..., Any], carry: Any, rows: list[Any], length: int, is_reversed: bool) -> Any:
    """A scan without a loop. What the backward needs of an iteration is never stacked."""
    parts = [[jnp.squeeze(part, 0) for part in lax.split(x, [1] * length)] for x in rows]
    found: list[Any] = [None] * length
    for i in reversed(range(length)) if is_reversed else range(length):
        carry, found[i] = iterate(carry, [part[i] for part in parts])
    return carry, [jnp.stack(ys) for ys in zip(*found, strict=True)]


def _constant(scope: Scope, node: Any, source: Source) -> Any:
    return scope.settled(node, source=source) if isinstance(node, Placed) else node


class _Scanned:
    """What a loop scans over: its first dim is whole."""

    def __init__(self, scope: Scope, node: Any, source: Source) -> None:
        if scope.observer:
            scope.observer.loop(node.layout)
        if node.layout.stored and node.layout.stored[0][0] == 0:
            node = scope.ready(node)
        if node.layout.stored:
            self.use = Use(node.register)
            layout = node.layout
        else:
            axes: tuple[Axes, ...] = ((), *scope.settled_axes(node.layout)[1:])
            placed = scope.settled(node, axes, source)
            self.use = Use(placed.register)
            layout = replace(placed.layout, is_pinned=node.layout.is_pinned)
        self.layout = replace(
            layout, shape=layout.shape[1:], axes=layout.axes[1:], names=layout.names[1:],
            stored=tuple((dim - 1, axes) for dim, axes in layout.stored),
        )  # fmt: skip


def _stacked(layout: Layout, length: int) -> Layout:
    return replace(
        layout, shape=(length, *layout.shape), axes=((), *layout.axes), names=("", *layout.names), is_pinned=False,
        is_weight=False,
    )  # fmt: skip


def while_(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    """A loop of unknown length. All devices decide alike, for the condition is computed whole."""
    params = eqn.params
    if params["cond_jaxpr"].out_avals[0].ndim:
        params, nodes = _with_one_condition(params, nodes)
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    consts = [scope.settled(node, source=scope.source(eqn)) for node in nodes[: num_cond + num_body]]
    starts = nodes[num_cond + num_body :]
    layouts = [one.layout for one in consts]
    body, carried = planned_body(
        scope, params["body_jaxpr"], layouts[num_cond:], [carried_layout(scope, x) for x in starts], ()
    )
    body.returning(carried)
    condition = _body(scope, params["cond_jaxpr"], [*layouts[:num_cond], *carried])
    decided = condition.scope.settled(condition.outs[0])
    condition.scope.program.outputs = [Use(decided.register)]
    arguments = [Use(one.register) for one in consts]
    arguments += [used_as(scope, node, layout) for node, layout in zip(starts, carried, strict=True)]

    def compute(*shards: Any) -> list[Any]:
        of_condition, of_body = shards[:num_cond], shards[num_cond : num_cond + num_body]
        return lax.while_loop(
            lambda carry: condition.run(*of_condition, *carry)[0],
            lambda carry: body.run(*of_body, *carry),
            list(shards[num_cond + num_body :]),
        )

    return scope.step(compute, arguments, carried, scope.source(eqn), ((body.scope.program, 1),))


def _with_one_condition(params: Mapping[str, Any], nodes: list[Any]) -> tuple[dict[str, Any], list[Any]]:
    """A loop that `vmap` made, in which each row has a condition: it runs until all are done, which then stay."""
    num_cond = params["cond_nconsts"]
    num_consts = num_cond + params["body_nconsts"]
    goes_on, step = jaxpr_as_fun(params["cond_jaxpr"]), jaxpr_as_fun(params["body_jaxpr"])

    def any_goes_on(*arguments: Any) -> Any:
        return [goes_on(*arguments)[0].any()]

    def body(*arguments: Any) -> Any:
        consts, before = arguments[:num_consts], arguments[num_consts:]
        (going,) = goes_on(*consts[:num_cond], *before)
        after = step(*consts[num_cond:], *before)
        places = range(going.ndim)
        return [
            lax.select(lax.broadcast_in_dim(going, x.shape, places), x, y) for x, y in zip(after, before, strict=True)
        ]

    of_condition = params["cond_jaxpr"].in_avals
    of_body = [*of_condition[:num_cond], *params["body_jaxpr"].in_avals]
    more = {"cond_jaxpr": jax.make_jaxpr(any_goes_on)(*of_condition), "body_jaxpr": jax.make_jaxpr(body)(*of_body)}
    return {**params, **more, "body_nconsts": num_consts}, [*nodes[:num_cond], *nodes]


def cond(scope: Scope, eqn: Any, nodes: list[Any]) -> Sequence[Any]:
    """Branches, whose results have one layout: that of the first branch that shards them."""
    index = scope.settled(nodes[0], source=scope.source(eqn))
    operands = [scope.settled(node, source=scope.source(eqn)) for node in nodes[1:]]
    layouts = [one.layout for one in operands]
    bodies = [_body(scope, branch, layouts) for branch in eqn.params["branches"]]
    results = []
    for i, v in enumerate(eqn.outvars):
        found = [body.scope.ready(body.outs[i]) for body in bodies]
        axes = next(
            (a for a in (body.scope.settled_axes(x.layout) for body, x in zip(bodies, found, strict=True)) if any(a)),
            ((),) * v.aval.ndim,
        )
        uses = [body.scope.use(body.scope.demand(x, axes), axes) for body, x in zip(bodies, found, strict=True)]
        varies = frozenset().union(*(use.varies for use in uses)) | index.layout.varies
        results.append(replace(found[0].layout, axes=axes, pending=(), varies=varies, is_pinned=False, is_weight=False))
    for body in bodies:
        body.returning(results)
    arguments = [Use(one.register) for one in (index, *operands)]

    def compute(index: Any, *shards: Any) -> list[Any]:
        return lax.switch(index, [body.run for body in bodies], *shards)

    inner = tuple((body.scope.program, 1) for body in bodies)
    return scope.step(compute, arguments, results, scope.source(eqn), inner)


RULES: dict[str, Rule] = {"scan": scan, "while": while_, "cond": cond}
