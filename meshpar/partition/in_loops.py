"""Makes what a loop over layers scans inside of the loop, where it is made of several parameters, layer by layer.

LoRA adds an update to a stack of kernels before the loss sees it. If that were done before the loop, the sums of all
layers would be held through the step, the gradients of these sums too, and under ZeRO-3 the kernels of all layers
would be gathered at once. In the loop there is one layer's sum at a time: the backward computes it again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, jaxpr_as_fun

from meshpar.partition.rules.loops import scan_counts
from meshpar.partition.scans import JIT, Origin, Origins, flattened
from meshpar.partition.stack import is_literal


def _saves(most: int, primitive: Any, *avals: Any, **params: Any) -> bool:
    """All but products as cheap as those of a merged row. `gathering_again` leaves out gathers and sums.

    Args:
      most: the most numbers that a product of a merged row contracts.
    """
    if primitive.name != "dot_general":
        return True
    (contracted, _), (batch, _) = params["dimension_numbers"]
    return bool(batch) or math.prod(avals[0].shape[i] for i in contracted) > most


def _contracted(origin: Origin) -> int:
    """The most numbers that a product of an origin's row contracts."""
    products = [e for e in jax.make_jaxpr(origin.made)(*origin.rows).eqns if e.primitive.name == "dot_general"]
    sizes = [[e.invars[0].aval.shape[i] for i in e.params["dimension_numbers"][0][0]] for e in products]
    return max(map(math.prod, sizes), default=0)


def made_in_loops(closed: ClosedJaxpr, num_params: int) -> ClosedJaxpr:
    """The same program, in which a loop makes each row of what it scans of its row of several parameters."""
    flat = flattened(closed, JIT)
    origins = Origins(flat.jaxpr, range(num_params))
    eqns: list[Any] = []
    has_changed = False
    for eqn in flat.jaxpr.eqns:
        found = _merged(eqn, origins) if eqn.primitive.name == "scan" else {}
        has_changed |= bool(found)
        eqns += _making(eqn, found, flat.jaxpr.invars) if found else [eqn]
    if not has_changed:
        return closed
    of = flat.jaxpr
    jaxpr = Jaxpr(of.constvars, of.invars, of.outvars, _needed(eqns, of.outvars), of.effects, debug_info=of.debug_info)
    return ClosedJaxpr(jaxpr, flat.consts)


def _merged(eqn: Any, origins: Origins) -> dict[int, Origin]:
    """Operand -> what it is made of, for those that a loop scans and that are made of several stacks of parameters."""
    first = sum(scan_counts(eqn.params))
    found = {i: origins.of(v) for i, v in enumerate(eqn.invars) if i >= first}
    return {i: origin for i, origin in found.items() if origin and len(origin.owns) > 1}


def _making(eqn: Any, merged: dict[int, Origin], arguments: Sequence[Any]) -> list[Any]:
    """The equations of a loop that makes these operands itself."""
    params = eqn.params
    num_consts, num_carry = scan_counts(params)
    first = num_consts + num_carry
    run = jaxpr_as_fun(params["jaxpr"])
    most = max(map(_contracted, merged.values()))
    owns: list[Any] = [merged[i].owns if i in merged else None for i in range(len(eqn.invars))]
    given = [[v] if own is None else [arguments[i] for i in own] for v, own in zip(eqn.invars, owns, strict=True)]

    def loop(*arrays: Any) -> list[Any]:
        consts, start = arrays[:num_consts], list(arrays[num_consts:first])

        def iterate(carry: Any, rows: Any) -> Any:
            left = iter(rows)
            scanned = [[next(left) for _ in one] for one in given[first:]]
            made = [merged[i].made(*one) if i in merged else one[0] for i, one in enumerate(scanned, first)]
            found = run(*consts, *carry, *made)
            return found[:num_carry], found[num_carry:]

        again = jax.checkpoint(iterate, policy=partial(_saves, most), prevent_cse=False)
        last, stacked = lax.scan(
            again, start, list(arrays[first:]),
            length=params["length"], reverse=params["reverse"], unroll=params["unroll"],
        )  # fmt: skip
        return [*last, *stacked]

    invars = [v for one in given for v in one]
    traced = jax.make_jaxpr(loop)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in invars))
    assert not traced.consts, "the body of a loop is a closed program"
    env: dict[Any, Any] = dict(zip(traced.jaxpr.invars, invars, strict=True))
    env |= dict(zip(traced.jaxpr.outvars, eqn.outvars, strict=True))

    def of(v: Any) -> Any:
        return v if is_literal(v) else env.setdefault(v, Var(v.aval))

    return [
        one.replace(invars=[of(v) for v in one.invars], outvars=[of(v) for v in one.outvars])
        for one in traced.jaxpr.eqns
    ]


def _needed(eqns: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """The equations on which a result depends."""
    read = {v for v in outvars if not is_literal(v)}
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or read & {*eqn.outvars}:
            kept.append(eqn)
            read |= {v for v in eqn.invars if not is_literal(v)}
    return kept[::-1]
