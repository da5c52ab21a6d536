"""The one walk over a traced program: its equations, and how often one call of the program runs each.

Loops multiply by their lengths, kernels by their grids. A branch of a pipeline counts as often as its schedule takes
it, and any other branch as if it was taken. An equation whose results no output needs is left out, as no compiler keeps
it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

# `parallel.pipeline.execute` names the scope of a conditional so.
_TAKEN = re.compile(r"taken_(\d+)_of_(\d+)$")


@dataclass(frozen=True)
class Visit:
    """An equation of a traced program.

    Args:
      equation: of a jaxpr; it may hold others, whose equations come after it.
      times: how often one call of the program runs it; None in a `while`, whose length no trace tells.
      scope: the named scopes in which it stands, with a slash between them.
      axis_sizes: of the mesh of the manual region (`shard_map`) in which it stands; empty outside.
      num_shards: into how many parts manual regions have cut its arrays. Inside of a region over a whole mesh they are
        one device's; outside they are whole, whatever GSPMD makes of them.
    """

    equation: Any
    times: Fraction | None = Fraction(1)
    scope: str = ""
    axis_sizes: Mapping[str, int] = field(default_factory=dict)
    num_shards: int = 1

    @property
    def primitive(self) -> str:
        return self.equation.primitive.name


def walk(program: ClosedJaxpr) -> Iterator[Visit]:
    """The equations that one call of a program runs, in its order.

    Args:
      program: of `jax.make_jaxpr`.
    """
    live, _ = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))
    return _walk(live, Visit(None))


def _walk(jaxpr: Jaxpr, around: Visit) -> Iterator[Visit]:
    for equation in jaxpr.eqns:
        visit = replace(around, equation=equation, scope=f"{around.scope}/{equation.source_info.name_stack}")
        yield visit
        inside = _inside(visit)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _walk(getattr(inner, "jaxpr", inner), inside)


def _inside(visit: Visit) -> Visit:
    """What holds for the equations inside of one."""
    if visit.primitive == "shard_map":
        sizes = dict(visit.equation.params["mesh"].shape)
        cut = math.prod(sizes[axis] for axis in visit.equation.params["newly_manual_axes"])
        return replace(visit, axis_sizes=sizes, num_shards=visit.num_shards * cut)
    repeats = _repeats(visit)
    return replace(visit, times=None if visit.times is None or repeats is None else visit.times * repeats)


def _repeats(visit: Visit) -> Fraction | None:
    """How often an equation runs those inside of it; None if no trace tells."""
    params = visit.equation.params
    if visit.primitive == "while":
        return None
    if visit.primitive == "scan":
        return Fraction(params["length"])
    if visit.primitive == "pallas_call":
        return Fraction(math.prod(params["grid_mapping"].grid))
    taken = _TAKEN.search(visit.scope) if visit.primitive == "cond" else None
    return Fraction(int(taken[1]), int(taken[2])) if taken else Fraction(1)


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, (Jaxpr, ClosedJaxpr))
