"""A stack of equal layers in a traced loss, whichever way the user wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

Atom = Var | Literal
Row = Atom | tuple[Atom, ...]
"""One value with a row for each layer, or one value for each layer."""
Own = int | tuple[int, ...]
"""An argument of the loss with a row for each layer, or an argument for each layer."""


@dataclass(frozen=True)
class Stack:
    """Equal layers.

    Args:
      start, stop: the operations of the loss that are the stack.
      num_layers: the number of layers.
      body: (*consts, *rows, *carry, *own) of one layer -> (*carry, *collected).
      consts: values that all layers read.
      rows: values that are no parameters, of which each layer reads its own.
      carry: what the first layer gets from what stands before.
      own: the parameters of the layers.
      outs: what the last layer returns of `carry`.
      collected: values that each layer returns beside.
      unroll: layers per iteration of the loop over them.
    """

    start: int
    stop: int
    num_layers: int
    body: ClosedJaxpr
    consts: tuple[Atom, ...]
    rows: tuple[Row, ...]
    carry: tuple[Atom, ...]
    own: tuple[Own, ...]
    outs: tuple[Var, ...]
    collected: tuple[Var | tuple[Var, ...], ...]
    unroll: int = 1

    @property
    def is_stacked(self) -> bool:
        """Whether the layers' parameters are stacked, and not arguments for each layer."""
        return all(isinstance(one, int) for one in self.own)


def is_literal(v: Any) -> bool:
    return isinstance(v, Literal)


def part_of(of: ClosedJaxpr, eqns: Sequence[Any], invars: Sequence[Var], outvars: Sequence[Any]) -> ClosedJaxpr:
    """Some of the operations of a program, as a program."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    jaxpr = Jaxpr(of.jaxpr.constvars, list(invars), list(outvars), list(eqns), effects, debug_info=of.jaxpr.debug_info)
    return ClosedJaxpr(jaxpr, of.consts)


def each(row: Row) -> tuple[Atom, ...]:
    """The values that a row consists of."""
    return row if isinstance(row, tuple) else (row,)


def arguments_of(own: Iterable[Own]) -> tuple[int, ...]:
    """The arguments of the loss that are these."""
    return tuple(dict.fromkeys(i for one in own for i in (one if isinstance(one, tuple) else (one,))))
