"""Finds reductions across devices inside a loop that adds up their results, although one after the loop would do.

A reduction can move behind the loop under three conditions: every operation from its result to the sum is linear; its
operand does not depend on the sum; and the loop carries nothing else that depends on the sum. A loop over training
steps violates the second condition, a loop that returns running sums the third.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from meshpar.inspection.program.flow import Flow, Value, reachable, starts_collective
from meshpar.inspection.program.text import Instruction
from meshpar.inspection.program.walk import trip_count

_LINEAR = {
    "add", "subtract", "multiply", "divide", "negate", "convert", "select", "copy", "bitcast", "transpose", "reshape",
    "slice", "dynamic-slice", "dynamic-update-slice", "opt-barrier", "copy-start", "copy-done", "tuple",
    "reduce-precision", "get-tuple-element", "parameter", "fusion", "call", "while",
}  # fmt: skip
_PRECISE = {"get-tuple-element", "tuple", "while", "fusion", "call", "opt-barrier"}
_COLLECTIVES = ("all-", "reduce-scatter")
_REDUCTIONS = ("all-reduce", "reduce-scatter")
_UNKNOWN = Value("", "")


@dataclass(frozen=True)
class CarriedSum:
    """Element `index` of a loop's carry, which may be a sum that the loop adds to in each iteration."""

    loop: Instruction
    index: int

    @property
    def body(self) -> str:
        return self.loop.word("body")


class Accumulations:
    """The reductions of a program inside loops that add up their results."""

    def __init__(self, flow: Flow):
        self.flow = flow
        self.program = flow.program
        self._known: dict[CarriedSum, bool] = {}
        self._needed: dict[Value, list[Value]] = {}

    @cached_property
    def turns(self) -> dict[int, int]:
        """Line of a reduction -> how often it runs, although once would do."""
        found: dict[int, int] = defaultdict(lambda: 1)
        for line, sums in self._reductions():
            turns = math.prod(trip_count(self.program, one.loop) or 1 for one in sums)
            found[line] = max(found[line], turns)
        return {line: turns for line, turns in found.items() if turns > 1}

    def _reductions(self) -> Iterator[tuple[int, tuple[CarriedSum, ...]]]:
        """Each reduction that flows into an output, with the sums whose loops it could leave."""
        root = self.program.root(self.program.entry)
        outputs = range(len(root.arrays)) if root.type.startswith("(") else [None]
        start = [(self.flow.result(self.program.entry, output), ()) for output in outputs]
        for value, sums in reachable(start, self._sources):
            one = self.flow.instruction(value)
            if one and starts_collective(one, _REDUCTIONS):
                operands = [Value(one.computation, name) for name in one.operands]
                yield one.line, tuple(each for each in sums if not self._depends(operands, each))

    def _sources(self, state: tuple[Value, tuple[CarriedSum, ...]]) -> Iterator[tuple[Value, tuple[CarriedSum, ...]]]:
        """The sources of a value inside the loops of `sums`, each with the sums whose loops contain it."""
        value, sums = state
        one = self.flow.instruction(value)
        if one is None or (sums and not _is_linear(one)):
            return
        for source in self.flow.sources(value):
            inside = sums
            if one.opcode == "while" and value.index is not None and source.computation == one.word("body"):
                entered = CarriedSum(one, value.index)
                inside = (*sums, entered) if self._is_sum(entered) else sums
            elif one.opcode == "parameter":
                inside = tuple(each for each in sums if each.body != value.computation)
            yield source, inside

    def _is_sum(self, sum_: CarriedSum) -> bool:
        """Whether the loop adds to the element, and computes nothing else in its carry from it."""
        if sum_ not in self._known:
            carry = range(len(self.program.root(sum_.body).operands))
            others = [self.flow.result(sum_.body, other) for other in carry if other != sum_.index]
            self._known[sum_] = self._adds(sum_) and not self._depends(others, sum_)
        return self._known[sum_]

    def _adds(self, sum_: CarriedSum) -> bool:
        """Whether the new value depends linearly on the old one; a stack that is written in slices does not count."""

        def sources(value: Value) -> list[Value]:
            one = self.flow.instruction(value)
            if one is None or value == self._carry(sum_.body, value.index) or not _is_linear(one):
                return []
            found = list(self.flow.sources(value))
            return found[1:] if one.opcode == "dynamic-update-slice" else found

        start = [self.flow.result(sum_.body, sum_.index)]
        return self._carry(sum_.body, sum_.index) in reachable(start, sources)

    def _depends(self, values: Iterable[Value], sum_: CarriedSum) -> bool:
        """Whether any of the values depends on the sum at the start of the iteration."""
        ends = {self._carry(sum_.body, sum_.index), self._carry(sum_.body, None), _UNKNOWN}
        return any(value in ends for value in reachable(values, self._needs))

    def _carry(self, body: str, index: int | None) -> Value:
        """Element `index` of the carry at the start of an iteration."""
        name = next(one.name for one in self.program.computation(body).values() if one.opcode == "parameter")
        return Value(body, name, index)

    def _needs(self, value: Value) -> list[Value]:
        """All values that a value is computed from."""
        if value not in self._needed:
            one = self.flow.instruction(value)
            self._needed[value] = [] if one is None else list(self._needs_of(one, value))
        return self._needed[value]

    def _needs_of(self, one: Instruction, value: Value) -> Iterator[Value]:
        here = value.computation
        if one.opcode == "parameter" and here != self.program.entry:
            # The sources of a branch's parameter are unknown.
            yield from list(self.flow.from_caller(one, value)) or [_UNKNOWN]
            if self.flow.is_body(here):  # the result of the previous iteration
                yield self.flow.result(here, value.index)
        elif one.opcode in _PRECISE and not (one.opcode == "tuple" and value.index is None):
            yield from self.flow.sources(value)
        elif one.opcode != "parameter":
            yield from (Value(here, name) for name in one.operands)


def _is_linear(one: Instruction) -> bool:
    squares = one.opcode == "multiply" and len(set(one.operands)) == 1
    return not squares and (
        one.opcode in _LINEAR or one.opcode.startswith(_COLLECTIVES) or one.opcode.endswith("-done")
    )
