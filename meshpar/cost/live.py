"""Estimates the memory that a traced program needs at its peak, without compiling it.

A value is held from the equation that computes it to the last that reads it. Elementwise operations whose result is
read once are computed where it is read, as compilers fuse them: they hold nothing, and what they read is held until
then. A loop holds its results and what one turn of its body needs. Compilers order operations as they like, so this is
an estimate; `inspection.program.memory` reads what a compiled program needs.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.interpreters.partial_eval import dce_jaxpr

from meshpar.cost.walk import inner_jaxprs

_VIEWS = {
    "broadcast_in_dim", "copy", "expand_dims", "iota", "name", "pvary", "reshape", "slice", "squeeze",
    "stop_gradient", "transpose",
}  # fmt: skip
_ELEMENTWISE = {
    "abs", "add", "add_any", "and", "convert_element_type", "div", "eq", "exp", "ge", "gt", "integer_pow", "le", "log",
    "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "reduce_precision", "rsqrt", "select_n",
    "sign", "sqrt", "square", "sub", "tanh",
}  # fmt: skip
_FUSING = _VIEWS | _ELEMENTWISE | {"reduce_max", "reduce_min", "reduce_sum"}
"""Operations that read what they need from the operations before them, without arrays in between."""
_CALLS = {"checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "remat2"}


def peak_bytes(program: ClosedJaxpr) -> int:
    """Bytes that the manual regions of a program hold at most on a device, beside their arguments.

    Args:
      program: the result of `jax.make_jaxpr`. Outside of manual regions arrays are whole, and not counted.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from meshpar.mesh.layout import MeshLayout
      >>> mesh = MeshLayout(data=4).abstract()
      >>> twice = jax.shard_map(lambda x: x @ x @ x, mesh=mesh, in_specs=P(), out_specs=P())
      >>> peak_bytes(jax.make_jaxpr(twice)(jnp.ones((8, 8), jnp.float32)))
      512
    """
    live, _ = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))
    return max((_peak(region) for region in _regions(live)), default=0)


def _regions(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    for equation in jaxpr.eqns:
        inside = inner_jaxprs(equation)
        if equation.primitive.name == "shard_map":
            yield from inside
        else:
            for one in inside:
                yield from _regions(one)


@dataclass(frozen=True)
class _Operation:
    """An equation of a flat program, whose values are numbered.

    Args:
      name: of its primitive.
      reads, writes: numbers of values.
      needs: bytes that it holds only while it runs, beside its results.
    """

    name: str
    reads: Sequence[int]
    writes: Sequence[int]
    needs: int


class _Flat:
    """A jaxpr in which the bodies of calls stand in place of the calls."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.operations: list[_Operation] = []
        self.sizes: list[int] = []
        arguments = {var: self._new(0) for var in [*jaxpr.constvars, *jaxpr.invars]}
        self.results = self._add(jaxpr, arguments)

    def _new(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def _add(self, jaxpr: Jaxpr, known: dict[Any, int]) -> list[int]:
        """Adds a jaxpr, given the numbers of its arguments, and returns those of its results."""

        def number(atom: Any) -> int:
            return self._new(0) if isinstance(atom, Literal) else known.setdefault(atom, self._new(0))

        for equation in jaxpr.eqns:
            reads = [number(atom) for atom in equation.invars]
            inside = inner_jaxprs(equation)
            name = equation.primitive.name
            if name in _CALLS and len(inside) == 1 and len(inside[0].invars) == len(reads):
                written = self._add(inside[0], dict(zip(inside[0].invars, reads, strict=True)))
                known |= zip(equation.outvars, written, strict=True)
                continue
            writes = [self._new(_size(var)) for var in equation.outvars]
            known |= zip(equation.outvars, writes, strict=True)
            needs = max(map(_peak, inside), default=0)
            if name == "cond":  # its results are those of the branch
                needs = max(0, needs - sum(map(_size, equation.outvars)))
            self.operations.append(_Operation(name, reads, writes, needs))
        return [number(atom) for atom in jaxpr.outvars]


def _peak(jaxpr: Jaxpr) -> int:
    flat = _Flat(jaxpr)
    last = _last_reads(flat)
    now = most = 0
    freed: dict[int, int] = defaultdict(int)
    for position, operation in enumerate(flat.operations):
        for value in operation.writes:
            now += flat.sizes[value]
            freed[last.get(value, position)] += flat.sizes[value]
        most = max(most, now + operation.needs)
        now -= freed[position]
    return most


def _last_reads(flat: _Flat) -> dict[int, int]:
    """Value -> position of the operation that reads it last. What is computed where it is read gets size 0."""
    readers = Counter(value for operation in flat.operations for value in operation.reads)
    end = len(flat.operations)
    last = dict.fromkeys(flat.results, end)
    for position, operation in reversed([*enumerate(flat.operations)]):
        at = position
        if len(operation.writes) == 1 and readers[operation.writes[0]] == 1:
            reader = last[operation.writes[0]]
            is_view = operation.name in _VIEWS
            if is_view or (operation.name in _ELEMENTWISE and reader < end and flat.operations[reader].name in _FUSING):
                flat.sizes[operation.writes[0]] = 0
                at = reader
        for value in operation.reads:
            last[value] = max(last.get(value, -1), at)
    return last


def _size(var: Any) -> int:
    """Bytes of a value; 0 of a random key and of what is no array."""
    aval = var.aval
    width = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return math.prod(aval.shape) * width if width else 0
