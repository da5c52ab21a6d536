"""Counts the passes over memory of the operations beside products, as the compilers of accelerators fuse them.

An operation on elements joins the pass of what it reads. A pass reads each array once, whichever of its operations read
it, and writes what products, collectives, loops or later passes read. Equal operations are one. The sum of a row is
computed in the pass that reads the row. A sum over rows, as of the gradient of a norm's weights, or of the largest
element of a column, ends its pass: what reads its result is in the next one. Products, collectives and loops end passes
too.

XLA and TorchInductor fuse so (openxla.org/xla/gpu_architecture; Ansel et al. 2024, PyTorch 2), but with limits on the
size of a kernel, which are not counted. `cost.touched` counts the smaller fusions of XLA:CPU.
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from meshpar.cost.flat import ELEMENTWISE, VIEWS, Flat, Operation, bodies
from meshpar.cost.flops import PRODUCTS
from meshpar.cost.touched import Touch
from meshpar.cost.traced import COLLECTIVES
from meshpar.cost.walk import Visit, repeats

_SUMS = {"argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"}
_FUSED = ELEMENTWISE | VIEWS | _SUMS | {
    "bitcast_convert_type", "clamp", "concatenate", "cos", "erf", "exp2", "expm1", "floor", "is_finite", "log1p", "not",
    "pad", "random_bits", "rem", "rev", "round", "shift_left", "shift_right_logical", "sin", "split",
}  # fmt: skip
_ALIASES = VIEWS | {"bitcast_convert_type", "optimization_barrier", "rev", "split", "squeeze"}
"""Operations whose result is read from the memory of their operand."""
_READS_PART = {"dynamic_slice", "gather"}
_WRITES_PART = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2, "scatter_add": 2}
"""Operations that write a part of their first operand, in place -> the operand of that size."""
_UNCOUNTED = {*PRODUCTS, *COLLECTIVES, "axis_index", "pallas_call", "pvary", "shard_map"}
_SCALARS = 128
"""Arrays of at most this many bytes are indices and counters."""


def passes(program: ClosedJaxpr, mean: bool = False) -> dict[Touch, Fraction]:
    """The passes of a device over its memory -> how often they run.

    Args:
      program: the result of `jax.make_jaxpr`.
      mean: see `walk.Visit`.
    """
    found: dict[Touch, Fraction] = defaultdict(Fraction)
    for body in bodies(program):
        _add(body, Fraction(1), found, mean)
    return found


def _add(jaxpr: Jaxpr, times: Fraction, found: dict[Touch, Fraction], mean: bool) -> None:
    body = _Body(Flat(jaxpr, merges=True))
    for num_bytes in body.by_pass.values():
        if num_bytes > _SCALARS:
            found[Touch(num_bytes)] += times
    for operation in body.flat.operations:
        if operation.inside and operation.name not in _UNCOUNTED | _WRITES_PART.keys() | _SUMS:
            visit = Visit(operation.equation, scope=str(operation.equation.source_info.name_stack), mean=mean)
            for inside, repeat in zip(operation.inside, repeats(visit, len(operation.inside)), strict=True):
                _add(inside, times * (1 if repeat is None else repeat), found, mean)


class _Body:
    """The passes of a flat program."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.level: dict[int, int] = defaultdict(int)
        """Value -> the pass that computes it; what reads it from memory is in a later one."""
        self.ready: dict[int, int] = defaultdict(int)
        """Value -> the first pass that may read it."""
        self.source: dict[int, int] = {}
        """A view -> the value whose memory it is."""
        self.in_memory: set[int] = set(flat.arguments.values())
        self.reads: dict[int, dict[int, int]] = defaultdict(dict)
        """Pass -> value that it reads from memory -> bytes."""
        self.more: dict[int, int] = defaultdict(int)
        """Pass -> bytes of parts that it writes in place, and of operations that are no passes."""
        for operation in flat.operations:
            self._place(operation)
        self.written = {self._origin(value) for value in flat.results}
        for operation in flat.operations:
            self._read(operation)

    @property
    def by_pass(self) -> dict[int, int]:
        """Pass -> the bytes that it reads and writes."""
        total = dict(self.more)
        for number, arrays in self.reads.items():
            total[number] = total.get(number, 0) + sum(arrays.values())
        for value in self.written - self.in_memory:
            number = self.level[value]
            total[number] = total.get(number, 0) + self.flat.sizes[value]
        return total

    def _origin(self, value: int) -> int:
        while value in self.source:
            value = self.source[value]
        return value

    def _place(self, operation: Operation) -> None:
        """Gives the results of an operation the number of their pass."""
        number = max((self.ready[value] for value in operation.reads), default=0)
        name = operation.name
        ends = not (name in _FUSED or name in _READS_PART) or (name in _SUMS and not _is_of_rows(operation.equation))
        for value in operation.writes:
            self.level[value] = number
            self.ready[value] = number + 1 if ends else number
            if name in _ALIASES and operation.reads:
                self.source[value] = operation.reads[0]
            elif ends and name not in _SUMS:
                self.in_memory.add(value)

    def _read(self, operation: Operation) -> None:
        """Adds what an operation reads from memory to its pass."""
        name = operation.name
        if name in _ALIASES:
            return
        number = self.level[operation.writes[0]] if operation.writes else 0
        is_pass = name in _FUSED or name in _READS_PART or name in _WRITES_PART
        for position, value in enumerate(operation.reads):
            origin = self._origin(value)
            if origin not in self.in_memory and not (is_pass and self.level[origin] == number):
                self.written.add(origin)
            is_array = origin in self.in_memory or self.level[origin] < number
            is_updated = name in _WRITES_PART and position == 0
            if is_pass and is_array and not is_updated:
                size = min(self.flat.sizes[value], self.flat.sizes[origin])
                if name in _READS_PART and position == 0:
                    size = min(size, self.flat.sizes[operation.writes[0]])
                self.reads[number][origin] = max(size, self.reads[number].get(origin, 0))
        if name in _WRITES_PART:
            self.more[number] += self.flat.sizes[operation.reads[_WRITES_PART[name]]]
        elif not is_pass and name not in _UNCOUNTED and not operation.inside:
            self.more[number] += sum(self.flat.sizes[value] for value in [*operation.reads, *operation.writes])


def _is_of_rows(equation: Any) -> bool:
    """Whether a sum is over the last dims, whose elements are beside each other in memory."""
    axes = equation.params.get("axes", ())
    ndim = equation.invars[0].aval.ndim
    return sorted(axes) == list(range(ndim - len(axes), ndim))
