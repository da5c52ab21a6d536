"""Finds what layers collect that the end of a loss only adds up, such as their shares of an auxiliary loss.

Each result of the end is then `f(parameters, message) + g(batch) * collected`. So a stage adds its own layers' part to
its sums, and sends none of it.

This file depends on JAX's internals: it builds jaxprs with `jax.extend.core`, as `cut` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, jaxpr_as_fun

from meshpar.partition.stack import is_literal, part_of


@dataclass(frozen=True)
class Added:
    """What the end of a loss adds to its results.

    Args:
      results: the places of the results that it adds to.
      factors: (*data) -> values that follow from no parameter.
      parts: (*factors, *collected) -> what each of `results` gains.
    """

    results: tuple[int, ...]
    factors: ClosedJaxpr
    parts: ClosedJaxpr


def added(last: ClosedJaxpr, data: Sequence[int], num_collected: int) -> Added | None:
    """What the end adds; None if a result depends on what layers collect in another way.

    Args:
      last: (*others, *collected) -> results: the loss, the count, and metrics.
      data: the places of the others that are no parameters.
    """
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in last.jaxpr.invars]
    num_others = len(structs) - num_collected
    floats = [i for i, v in enumerate(last.jaxpr.outvars) if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
    end = jaxpr_as_fun(last)

    def gained(*arguments: Any) -> list[Any]:
        others, collected = arguments[:num_others], arguments[num_others : len(structs)]

        def of_floats(*collected: Any) -> list[Any]:
            results = end(*others, *collected)
            return [results[i] for i in floats]

        return jax.jvp(of_floats, collected, arguments[len(structs) :])[1]

    closed = jax.make_jaxpr(gained)(*structs, *structs[num_others:])
    invars = closed.jaxpr.invars
    collected = invars[len(structs) :]
    reached = {*collected}
    for eqn in closed.jaxpr.eqns:
        if any(not is_literal(v) and v in reached for v in eqn.invars):
            reached.update(eqn.outvars)
    gains = [(i, v) for i, v in zip(floats, closed.jaxpr.outvars, strict=True) if not is_literal(v) and v in reached]
    if 1 in dict(gains):  # layers add to the loss and the metrics, and not to the number of tokens
        return None
    needed, read = _needed(closed.jaxpr, [v for _, v in gains])
    given = [invars[i] for i in data]
    if read & {*invars} - {*given, *collected}:
        return None
    parts = [eqn for eqn in needed if {*eqn.outvars} & reached]
    inputs = dict.fromkeys(v for eqn in parts for v in eqn.invars if not is_literal(v))
    factors = [v for v in inputs if v not in reached and v not in closed.jaxpr.constvars]
    return Added(
        tuple(i for i, _ in gains),
        part_of(closed, [eqn for eqn in needed if not {*eqn.outvars} & reached], given, factors),
        part_of(closed, parts, [*factors, *collected], [v for _, v in gains]),
    )


_LINEAR = {"convert_element_type", "copy", "neg", "reduce_sum", "reshape", "squeeze", "transpose", "mul", "div", "add"}
"""Operations whose result is zero if their first operand is, and the second operand of a sum."""


def without(last: ClosedJaxpr, num_collected: int) -> ClosedJaxpr:
    """The end without what it adds: (*others) -> results. Zeros are not added, so that sums over devices stay parts."""
    num_others = len(last.jaxpr.invars) - num_collected
    zero = {*last.jaxpr.invars[num_others:]}
    same: dict[Var, Any] = {}
    eqns = []
    for eqn in last.jaxpr.eqns:
        eqn = eqn.replace(invars=[v if is_literal(v) else same.get(v, v) for v in eqn.invars])
        others = [v for v in eqn.invars if is_literal(v) or v not in zero]
        if eqn.primitive.name == "add" and len(others) == 1:
            same[eqn.outvars[0]] = others[0]
            continue
        if eqn.primitive.name in _LINEAR and others == eqn.invars[1:] * (len(others) > 0):
            zero.update(eqn.outvars)
        eqns.append(eqn)
    outvars = [v if is_literal(v) else same.get(v, v) for v in last.jaxpr.outvars]
    run = jaxpr_as_fun(part_of(last, eqns, last.jaxpr.invars, outvars))
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in last.jaxpr.invars]

    def end(*others: Any) -> list[Any]:
        return run(*others, *(jnp.zeros(x.shape, x.dtype) for x in structs[num_others:]))

    return jax.make_jaxpr(end)(*structs[:num_others])


def _needed(jaxpr: Jaxpr, targets: Sequence[Var]) -> tuple[list[Any], set[Any]]:
    """The operations that compute these values, and all values that they read."""
    read: set[Any] = {*targets}
    found = []
    for eqn in reversed(jaxpr.eqns):
        if {*eqn.outvars} & read:
            found.append(eqn)
            read.update(v for v in eqn.invars if not is_literal(v))
    return found[::-1], read
