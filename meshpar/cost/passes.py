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

from jax.extend.core import ClosedJaxpr

from meshpar.cost.flat import ELEMENTWISE, SCALARS, SLICES, UNCOUNTED, UPDATES, VIEWS, Flat, Operation, flat_bodies
from meshpar.cost.touched import Touch

_SUMS = {"argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"}
_FUSED = ELEMENTWISE | VIEWS | _SUMS | {
    "bitcast_convert_type", "clamp", "concatenate", "cos", "erf", "exp2", "expm1", "floor", "is_finite", "log1p", "not",
    "pad", "random_bits", "rem", "rev", "round", "shift_left", "shift_right_logical", "sin", "split",
}  # fmt: skip
_ALIASES = VIEWS | {"bitcast_convert_type", "optimization_barrier", "rev", "split", "squeeze"}
"""Operations whose result is read from the memory of their operand."""


def passes(program: ClosedJaxpr, mean: bool = False) -> dict[Touch, Fraction]:
    """The passes of a device over its memory -> how often they run; see `flat_bodies`."""
    found: dict[Touch, Fraction] = defaultdict(Fraction)
    for flat, times in flat_bodies(program, mean, merges=True):
        for num_bytes in _Body(flat).by_pass.values():
            if num_bytes > SCALARS:
                found[Touch(num_bytes)] += times
    return found


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
        ends = not (name in _FUSED or name in SLICES) or (name in _SUMS and not _is_of_rows(operation.equation))
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
        is_pass = name in _FUSED or name in SLICES or name in UPDATES
        for position, value in enumerate(operation.reads):
            origin = self._origin(value)
            if origin not in self.in_memory and not (is_pass and self.level[origin] == number):
                self.written.add(origin)
            is_array = origin in self.in_memory or self.level[origin] < number
            is_updated = name in UPDATES and position == 0
            if is_pass and is_array and not is_updated:
                size = min(self.flat.sizes[value], self.flat.sizes[origin])
                if name in SLICES and position == 0:
                    size = min(size, self.flat.sizes[operation.writes[0]])
                self.reads[number][origin] = max(size, self.reads[number].get(origin, 0))
        if name in UPDATES:
            self.more[number] += self.flat.sizes[operation.reads[UPDATES[name]]]
        elif not is_pass and name not in UNCOUNTED and not operation.inside:
            self.more[number] += sum(self.flat.sizes[value] for value in [*operation.reads, *operation.writes])


def _is_of_rows(equation: Any) -> bool:
    """Whether a sum is over the last dims, whose elements are beside each other in memory."""
    axes = equation.params.get("axes", ())
    ndim = equation.invars[0].aval.ndim
    return sorted(axes) == list(range(ndim - len(axes), ndim))
