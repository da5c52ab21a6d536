"""Walks the equations of a traced program, and counts how often one call of the program runs each of them.

The body of a loop runs as often as the loop's length says; if data decide, as often as its scope says, see
`parallel.scopes`. A kernel runs as often as its grid has cells; a kernel whose operations are declared is not entered.
A branch of a pipeline counts as often as its schedule takes it; every other branch counts as always taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import count
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from meshpar.parallel.scopes import declared_flops, times_of_branches, times_of_loop
from meshpar.partition.op import partitioned_p, whole


@dataclass(frozen=True)
class Visit:
    """An equation of a traced program.

    Args:
      equation: an equation of a jaxpr. The equations of jaxprs inside of it are visited after it.
      times: how often one call of the program runs it; None in a `while` whose length is neither known nor expected.
      scope: the named scopes that contain it, separated by slashes.
      axis_sizes: the sizes of the mesh's axes in a manual region (`shard_map`); empty outside.
      num_shards: the number of shards that manual regions make of its arrays: the number of devices in a region over
        the whole mesh, 1 outside, where arrays are whole.
      loops: the numbers of the loops that contain it, the innermost last. Loops of one iteration are none.
      mean: whether `times` is the mean of all stages of a pipeline; otherwise it is that of a stage with both ends.
    """

    equation: Any
    times: Fraction | None = Fraction(1)
    scope: str = ""
    axis_sizes: Mapping[str, int] = field(default_factory=dict)
    num_shards: int = 1
    loops: tuple[int, ...] = ()
    mean: bool = False

    @property
    def primitive(self) -> str:
        return self.equation.primitive.name


@lru_cache(maxsize=2)  # products and collectives of a program are counted one after the other
def walk(program: ClosedJaxpr, mean: bool = False) -> tuple[Visit, ...]:
    """The equations that one call of a program runs, in its order.

    Args:
      program: the result of `jax.make_jaxpr`.
      mean: see `Visit`.
    """
    return tuple(_walk(live_part(program), Visit(None, mean=mean), count(1)))


def live_part(program: ClosedJaxpr) -> Jaxpr:
    """The program without equations on which no output depends, which compilers remove."""
    return dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))[0]


def _walk(jaxpr: Jaxpr, around: Visit, numbers: Iterator[int]) -> Iterator[Visit]:
    for equation in jaxpr.eqns:
        visit = replace(around, equation=equation, scope=f"{around.scope}/{equation.source_info.name_stack}")
        yield visit
        inside = _inside(visit, numbers)
        inner = inner_jaxprs(equation)
        for jaxpr_inside, each in zip(inner, repeats(visit, len(inner)), strict=True):
            times = None if visit.times is None or each is None else visit.times * each
            yield from _walk(jaxpr_inside, replace(inside, times=times), numbers)


def _inside(visit: Visit, numbers: Iterator[int]) -> Visit:
    """The visit from which the visits of the equations inside this one are derived."""
    if visit.primitive == "shard_map":
        sizes = dict(visit.equation.params["mesh"].shape)
        num_shards = math.prod(sizes[axis] for axis in visit.equation.params["newly_manual_axes"])
        return replace(visit, axis_sizes=sizes, num_shards=visit.num_shards * num_shards)
    if visit.primitive == "while" or (visit.primitive == "scan" and visit.equation.params["length"] > 1):
        return replace(visit, loops=(*visit.loops, next(numbers)))
    return visit


def repeats(visit: Visit, num_inside: int) -> Sequence[Fraction | None]:
    """How often an equation runs each of the jaxprs inside of it; None if that is unknown."""
    params = visit.equation.params
    if visit.primitive == "while":
        expected = times_of_loop(visit.scope)
        return [None if expected is None else Fraction(expected)] * num_inside
    if visit.primitive == "scan":
        return [Fraction(params["length"])] * num_inside
    if visit.primitive == "pallas_call":
        if declared_flops(visit.scope) is not None:
            return [Fraction(0)] * num_inside
        return [Fraction(math.prod(params["grid_mapping"].grid))] * num_inside
    if visit.primitive == "cond" and (times := times_of_branches(visit.scope, visit.mean)):
        return times if len(times) > 1 else times * num_inside
    return [Fraction(1)] * num_inside


def inner_jaxprs(equation: Any) -> list[Jaxpr]:
    """The jaxprs in an equation: the body of a loop or a call, the branches of a conditional, what an op does."""
    if equation.primitive is partitioned_p:
        structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]
        return [jax.make_jaxpr(whole(equation.params["signature"]))(*structs).jaxpr]
    return list(jaxprs_in_params(equation.params))
