"""Flattens a jaxpr to a list of operations, with calls inlined and elementwise operations fused as compilers do it.

An elementwise operation whose result is read once is computed by its reader, so its result is no array. `cost.live`
counts the bytes that are held; `cost.touched` and `cost.passes` count the bytes that are read and written.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from meshpar.cost.flops import PRODUCTS
from meshpar.cost.traced import COLLECTIVES
from meshpar.cost.walk import Visit, inner_jaxprs, live_part, repeats

VIEWS = {
    "broadcast_in_dim", "copy", "expand_dims", "iota", "layout_constraint", "name", "pvary", "reshape", "slice",
    "squeeze", "stop_gradient", "transpose",
}  # fmt: skip
SAME = {
    "expand_dims", "layout_constraint", "name", "optimization_barrier", "pvary", "reshape", "squeeze", "stop_gradient",
}  # fmt: skip
"""Operations whose results are their operands, in the same memory."""
ELEMENTWISE = {
    "abs", "add", "add_any", "and", "convert_element_type", "div", "eq", "exp", "ge", "gt", "integer_pow", "le", "log",
    "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "reduce_precision", "rsqrt", "select_n",
    "sign", "sqrt", "square", "sub", "tanh",
}  # fmt: skip
_FUSING = VIEWS | ELEMENTWISE | {"reduce_max", "reduce_min", "reduce_sum"}
"""Operations that compilers fuse with the operations whose results they read, without arrays in between."""
EXPENSIVE = {"div", "exp", "integer_pow", "log", "logistic", "pow", "rsqrt", "sqrt", "tanh"}
"""Elementwise operations that take longer to compute than to read their operands."""
_CHEAP = ELEMENTWISE - EXPENSIVE | {"dynamic_slice"}
"""Operations that compilers rather compute twice than store their results."""
SLICES = {"dynamic_slice", "gather"}
"""Operations that read a part of their first operand."""
UPDATES = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2}
"""Operations that write a part of their first operand, in place -> the operand of that size."""
UNCOUNTED = {*PRODUCTS, *COLLECTIVES, "axis_index", "pallas_call", "pvary", "shard_map"}
"""Operations whose memory traffic is not counted beside that of products and collectives."""
SCALARS = 128
"""Operations on at most this many bytes compute indices and counters, which cost nothing next to arrays."""
_CALLS = {"checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "remat2"}


def bodies(program: ClosedJaxpr) -> list[Jaxpr]:
    """The part of a program that a device runs: its manual regions (`shard_map`), or all of it if it has none."""
    live = live_part(program)
    return list(_regions(live)) or [live]


def _regions(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    for equation in jaxpr.eqns:
        inside = inner_jaxprs(equation)
        if equation.primitive.name == "shard_map":
            yield from inside
        else:
            for one in inside:
                yield from _regions(one)


@dataclass(frozen=True)
class Operation:
    """An equation of a flat program, whose values are numbered.

    Args:
      name: of its primitive.
      reads, writes: numbers of values.
      inside: the bodies of a loop, or the branches of a conditional.
    """

    equation: Any
    reads: Sequence[int]
    writes: Sequence[int]
    inside: Sequence[Jaxpr]

    @property
    def name(self) -> str:
        return self.equation.primitive.name


def size_of(var: Any) -> int:
    """Bytes of a value; 0 for a random key and for a value that is no array."""
    aval = var.aval
    width = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return math.prod(aval.shape) * width if width else 0


class Flat:
    """A jaxpr in which the bodies of calls stand in place of the calls.

    Args:
      once: whether the body of a loop of one iteration stands in its place too.
      merges: whether equal operations on elements are one, as XLA merges them; not those that `jax.checkpoint` repeats,
        whose operands XLA gets behind a barrier.
      shares: whether a result that is an operand in the same memory is the same value, see `SAME`.
      size: the bytes of a value.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        once: bool = False,
        merges: bool = False,
        shares: bool = False,
        size: Callable[[Any], int] = size_of,
    ) -> None:
        self._size = size
        self._once = once
        self._shares = shares
        self._merges = merges
        self._made: dict[Any, list[int]] = {}
        self._behind: Any = None
        """The checkpoint that contains the equation."""
        self.operations: list[Operation] = []
        self.sizes: list[int] = []
        """Bytes of each value."""
        self.arguments = {var: self._new(self._size(var)) for var in [*jaxpr.constvars, *jaxpr.invars]}
        self.results = self._add(jaxpr, dict(self.arguments))
        self.last_reads, self.fused = self._fuse()
        """Value -> position of the operation that reads it last; the values that their reader computes, no arrays."""

    def _new(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def _add(self, jaxpr: Jaxpr, known: dict[Any, int]) -> list[int]:
        """Adds a jaxpr, given the numbers of its arguments, and returns the numbers of its results."""

        def number(atom: Any) -> int:
            if isinstance(atom, Literal):
                return self._new(0)
            if atom not in known:
                known[atom] = self._new(self._size(atom))
            return known[atom]

        for equation in jaxpr.eqns:
            reads = [number(atom) for atom in equation.invars]
            inside = inner_jaxprs(equation)
            if self._is_call(equation) and len(inside) == 1 and len(inside[0].invars) == len(reads):
                around = self._behind
                self._behind = id(equation) if equation.params.get("prevent_cse") else around
                written = self._add(inside[0], dict(zip(inside[0].invars, reads, strict=True)))
                self._behind = around
                known |= zip(equation.outvars, written, strict=True)
                continue
            if self._shares and equation.primitive.name in SAME:
                known |= zip(equation.outvars, reads, strict=True)
                continue
            key = self._key(equation, reads)
            if key and key in self._made:
                known |= zip(equation.outvars, self._made[key], strict=True)
                continue
            writes = [self._new(self._size(var)) for var in equation.outvars]
            known |= zip(equation.outvars, writes, strict=True)
            if key:
                self._made[key] = writes
            self.operations.append(Operation(equation, reads, writes, inside))
        return [number(atom) for atom in jaxpr.outvars]

    def _key(self, equation: Any, reads: Sequence[int]) -> Any:
        """What equal operations have in common; None for one that is not merged."""
        if not self._merges or equation.primitive.name not in _FUSING:
            return None
        operands = [str(x) if isinstance(x, Literal) else i for x, i in zip(equation.invars, reads, strict=True)]
        key = (self._behind, equation.primitive.name, *operands, *equation.params.items())
        try:
            hash(key)
        except TypeError:  # a parameter that is a list or an array
            return None
        return key

    def _is_call(self, equation: Any) -> bool:
        is_once = self._once and equation.primitive.name == "scan" and equation.params["length"] == 1
        return is_once or equation.primitive.name in _CALLS

    @cached_property
    def recomputed(self) -> set[int]:
        """Values that every reader computes: fused values, and cheap values that only fusions read."""
        found = set(self.fused)
        readers: dict[int, set[str]] = defaultdict(set)
        for operation in self.operations:
            for value in operation.reads:
                readers[value].add(operation.name)
        kept = set(self.results)
        for operation in self.operations:
            is_cheap = operation.name in _CHEAP and operation.writes[0] not in kept
            if is_cheap and readers[operation.writes[0]] <= _FUSING | {"dynamic_update_slice"}:
                found.add(operation.writes[0])
        return found

    def part(self, operation: Operation) -> int | None:
        """Bytes of the part of its first operand that an operation reads or writes; None if it uses all of it."""
        if operation.name in SLICES:
            return self.sizes[operation.writes[0]]
        return self.sizes[operation.reads[UPDATES[operation.name]]] if operation.name in UPDATES else None

    def _fuse(self) -> tuple[dict[int, int], set[int]]:
        """The last reads and the fused values; a fused operation reads when its reader runs."""
        readers = Counter(value for operation in self.operations for value in operation.reads)
        end = len(self.operations)
        last = dict.fromkeys(self.results, end)
        fused: set[int] = set()
        for position, operation in reversed([*enumerate(self.operations)]):
            at = position
            if len(operation.writes) == 1 and readers[operation.writes[0]] == 1:
                reader = last[operation.writes[0]]
                is_fused = reader < end and self.operations[reader].name in _FUSING and operation.name in ELEMENTWISE
                if is_fused or operation.name in VIEWS:
                    fused.add(operation.writes[0])
                    at = reader
            for value in operation.reads:
                last[value] = max(last.get(value, -1), at)
        return last, fused


def flat_bodies(program: ClosedJaxpr, mean: bool = False, merges: bool = False) -> Iterator[tuple[Flat, Fraction]]:
    """The flat program of a device and those of its loops and branches, and how often each runs; see `Flat`, `bodies`.

    Args:
      program: the result of `jax.make_jaxpr`. A `while` of unknown length counts once.
      mean: see `walk.Visit`.
    """
    for body in bodies(program):
        yield from _with_inner(body, Fraction(1), mean, merges)


def _with_inner(jaxpr: Jaxpr, times: Fraction, mean: bool, merges: bool) -> Iterator[tuple[Flat, Fraction]]:
    flat = Flat(jaxpr, merges=merges)
    yield flat, times
    for one in flat.operations:
        if is_entered(one):
            visit = Visit(one.equation, scope=str(one.equation.source_info.name_stack), mean=mean)
            for inside, repeat in zip(one.inside, repeats(visit, len(one.inside)), strict=True):
                yield from _with_inner(inside, times * (1 if repeat is None else repeat), mean, merges)


def is_entered(one: Operation) -> bool:
    """Whether an operation costs what its body does: a loop, a conditional or a call."""
    return bool(one.inside) and one.name not in UNCOUNTED | UPDATES.keys()
