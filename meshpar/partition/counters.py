"""Takes counters out of loops over layers.

`nnx.scan` returns what each layer leaves of its state, such as the count of the random keys that its dropout drew. A
pipeline sends no integers from layer to layer, and does not have to: counters follow from themselves. So a loop that
returns them becomes two, one over the counters and one over everything else.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Var
from jax.interpreters.partial_eval import dce_jaxpr

from meshpar.partition.rules.loops import scan_counts
from meshpar.partition.stack import is_literal, part_of


def counters_apart(flat: ClosedJaxpr) -> ClosedJaxpr:
    """The same program, whose loops return no integers that follow from no other iteration."""
    jaxpr = flat.jaxpr
    read = {v for eqn in jaxpr.eqns for v in eqn.invars if not is_literal(v)} | {*filter(_is_var, jaxpr.outvars)}
    eqns = [part for eqn in jaxpr.eqns for part in _parts(flat, eqn, read)]
    return part_of(flat, eqns, jaxpr.invars, jaxpr.outvars)


def _parts(flat: ClosedJaxpr, eqn: Any, read: Collection[Var]) -> list[Any]:
    if eqn.primitive.name != "scan":
        return [eqn]
    outs = [v for v in eqn.outvars if v in read]
    counters = {v for place, v in enumerate(eqn.outvars) if v in read and _is_counter(eqn, place)}
    if not counters:
        return [eqn]
    given = list(dict.fromkeys(filter(_is_var, eqn.invars)))
    loop = part_of(flat, [eqn], given, outs).jaxpr
    loop = loop.replace(debug_info=loop.debug_info.with_unknown_names())  # those of the program's arguments
    halves = [[v in counters for v in outs], [v not in counters for v in outs]]
    return [part for half in halves for part in dce_jaxpr(loop, half)[0].eqns]


def _is_counter(eqn: Any, place: int) -> bool:
    """Whether a result is an integer of each iteration that nothing which the loop carries changes."""
    num_consts, num_carry = scan_counts(eqn.params)
    body = eqn.params["jaxpr"].jaxpr
    if place < num_carry or not jnp.issubdtype(body.outvars[place].aval.dtype, jnp.integer):
        return False
    _, used = dce_jaxpr(body, [i == place for i in range(len(body.outvars))])
    return not any(used[num_consts : num_consts + num_carry])


def _is_var(v: Any) -> bool:
    return not is_literal(v)
