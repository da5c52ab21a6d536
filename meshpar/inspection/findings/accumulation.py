"""Sums that a loop builds turn by turn, and the reductions across devices that stand inside although they need not.

A reduction can be moved behind a loop where what it reduces is only added up: every operation from it to the sum is
linear, it reads nothing that the loop changes with the sum, and nothing but the sum is made of the sum. A loop over
training steps fails the second, one that keeps the running sums the third; neither is found here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from meshpar.inspection.program.flow import Flow, Value
from meshpar.inspection.program.text import Instruction
from meshpar.inspection.program.walk import trip_count

_LINEAR = {
    "add", "subtract", "multiply", "divide", "negate", "convert", "select", "copy", "bitcast", "transpose", "reshape",
    "slice", "dynamic-slice", "dynamic-update-slice", "optimization-barrier", "copy-start", "copy-done", "tuple",
    "reduce-precision", "get-tuple-element", "parameter", "fusion", "call", "while",
}  # fmt: skip
_PRECISE = {"get-tuple-element", "tuple", "while", "fusion", "call"}
_COLLECTIVES = ("all-", "reduce-scatter")
_REDUCTIONS = ("all-reduce", "reduce-scatter")
_UNKNOWN = Value("", "")


@dataclass(frozen=True)
class Sum:
    """Element `index` of what a loop carries, if the loop adds to it in each turn."""

    loop: Instruction
    index: int

    @property
    def body(self) -> str:
        return self.loop.word("body")


class Accumulations:
    """The reductions of a program that stand in a loop which adds up what they make.

    Args:
      flow: the program's data flow.
    """

    def __init__(self, flow: Flow):
        self.flow, self.program = flow, flow.program
        self._known: dict[Sum, bool] = {}
        self._needed: dict[Value, list[Value]] = {}

    @cached_property
    def turns(self) -> dict[int, int]:
        """Line of a reduction -> how often it reduces what could be reduced once."""
        found: dict[int, int] = defaultdict(lambda: 1)
        for line, sums in self._reductions():
            turns = 1
            for one in sums:
                turns *= trip_count(self.program, one.loop) or 1
            found[line] = max(found[line], turns)
        return {line: turns for line, turns in found.items() if turns > 1}

    def _reductions(self) -> Iterator[tuple[int, tuple[Sum, ...]]]:
        """Each reduction behind an output, with the sums inside whose loops it stands."""
        root = self.program.root(self.program.entry)
        outputs = range(len(root.arrays)) if root.type.startswith("(") else [None]
        todo = [(self.flow.result(self.program.entry, output), ()) for output in outputs]
        seen = set()
        while todo:
            value, sums = todo.pop()
            one = self._instruction(value)
            if one is None or (value, sums) in seen:
                continue
            seen.add((value, sums))
            if one.opcode.startswith(_REDUCTIONS) and not one.opcode.endswith("-done"):
                yield one.line, tuple(each for each in sums if self._is_free(one, each))
            if not sums or _is_linear(one):
                todo += [(source, self._inside(one, value, source, sums)) for source in self.flow.sources(one, value)]

    def _inside(self, one: Instruction, value: Value, source: Value, sums: tuple[Sum, ...]) -> tuple[Sum, ...]:
        """The sums in whose loops a source stands: one more where the way leads into a loop, fewer where out of it."""
        if one.opcode == "while" and value.index is not None and source.computation == one.word("body"):
            entered = Sum(one, value.index)
            return (*sums, entered) if self._is_sum(entered) else sums
        if one.opcode == "parameter":
            return tuple(each for each in sums if each.body != value.computation)
        return sums

    # Is it a sum, and of what -----------------------------------------------------------------------------------

    def _is_sum(self, sum_: Sum) -> bool:
        if sum_ not in self._known:
            self._known[sum_] = self._adds(sum_) and not self._is_read_elsewhere(sum_)
        return self._known[sum_]

    def _adds(self, sum_: Sum) -> bool:
        """Whether element `index` goes into itself, linearly and other than as the buffer of a stack."""
        todo, seen = [self.flow.result(sum_.body, sum_.index)], set()
        while todo:
            value = todo.pop()
            one = self._instruction(value)
            if one is None or value in seen:
                continue
            seen.add(value)
            if one.opcode == "parameter" and value.computation == sum_.body:
                if value.index == sum_.index:
                    return True
            elif _is_linear(one):
                stacked = one.opcode == "dynamic-update-slice"
                todo += list(self.flow.sources(one, value))[int(stacked) :]
        return False

    def _is_read_elsewhere(self, sum_: Sum) -> bool:
        """Whether anything else that the loop carries is made of the sum."""
        carried = range(len(self.program.root(sum_.body).operands))
        return self._reaches([self.flow.result(sum_.body, other) for other in carried if other != sum_.index], sum_)

    def _is_free(self, reduction: Instruction, sum_: Sum) -> bool:
        """Whether what is reduced does not depend on the sum."""
        return not self._reaches([Value(reduction.computation, name) for name in reduction.operands], sum_)

    def _reaches(self, start: Iterable[Value], sum_: Sum) -> bool:
        """Whether any of these values depends on the sum as the turn found it."""
        parameter = next(one.name for one in self.program.computation(sum_.body).values() if one.opcode == "parameter")
        ends = {Value(sum_.body, parameter, sum_.index), Value(sum_.body, parameter, None), _UNKNOWN}
        todo, seen = list(start), set()
        while todo:
            value = todo.pop()
            if value in ends:
                return True
            if value not in seen:
                seen.add(value)
                todo += self._needs(value)
        return False

    def _needs(self, value: Value) -> list[Value]:
        """All the values of which a value is made, in whatever way."""
        if value not in self._needed:
            one = self._instruction(value)
            self._needed[value] = [] if one is None else list(self._needs_of(one, value))
        return self._needed[value]

    def _needs_of(self, one: Instruction, value: Value) -> Iterator[Value]:
        here = value.computation
        if one.opcode == "parameter" and here != self.program.entry:
            # A branch's parameter comes from nowhere that is followed.
            yield from list(self.flow.from_caller(one, value)) or [_UNKNOWN]
            if self.flow.is_body(here):  # as the turn before left it
                yield self.flow.result(here, value.index)
        elif one.opcode in _PRECISE and not (one.opcode == "tuple" and value.index is None):
            yield from self.flow.sources(one, value)
        elif one.opcode != "parameter":
            yield from (Value(here, name) for name in one.operands)

    def _instruction(self, value: Value) -> Instruction | None:
        return self.program.computation(value.computation).get(value.name)


def _is_linear(one: Instruction) -> bool:
    squares = one.opcode == "multiply" and len(set(one.operands)) == 1
    return not squares and (
        one.opcode in _LINEAR or one.opcode.startswith(_COLLECTIVES) or one.opcode.endswith("-done")
    )
