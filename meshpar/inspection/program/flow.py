"""Which argument of a program a value stems from, or ends in: the data flow that gives a collective its tensor.

Two questions are asked of a collective. Is what it sends a *view* of an argument (a slice of stacked layers, in
another dtype or layout)? Then it gathers that parameter. Does what it makes flow, element by element, into an output
that is written over an argument? Then it reduces that parameter's gradient. Both are followed through fusions and
loops; neither is followed through arithmetic that mixes elements, so an answer is right where there is one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from meshpar.inspection.program.text import Instruction, Program

_VIEWS = {
    "copy", "bitcast", "convert", "transpose", "reshape", "slice", "dynamic-slice", "reduce-precision",
    "optimization-barrier", "all-gather", "copy-start", "copy-done", "all-gather-start", "all-gather-done",
}  # fmt: skip
_CALLS = ("calls", "to_apply")
_MIXES = {"dot", "convolution", "custom-call", "broadcast", "reduce", "gather", "scatter", "sort", "constant", "iota"}
_COLLECTIVES = ("all-", "reduce-scatter", "collective-permute", "collective-broadcast")


class Value(NamedTuple):
    """A value in a computation; `index` of it, if it is a tuple."""

    computation: str
    name: str
    index: int | None = None


class Flow:
    """The data flow of a program.

    Args:
      program: its text, read.
    """

    def __init__(self, program: Program):
        self.program = program

    @cached_property
    def arguments(self) -> dict[int, Instruction]:
        """Number -> the entry's parameter."""
        entry = self.program.computation(self.program.entry).values()
        return {_number(one): one for one in entry if one.opcode == "parameter"}

    def gathers(self, one: Instruction) -> tuple[str, ...]:
        """The paths of the arguments of which the operands of an instruction are views."""
        found = (self._argument(Value(one.computation, name)) for name in one.operands)
        return tuple(dict.fromkeys(argument_path(a) for a in found if a is not None))

    def updates(self, one: Instruction) -> tuple[str, ...]:
        """The paths of the arguments over which is written what an instruction makes."""
        return tuple(self._updates.get(one.line, ()))

    def is_body(self, computation: str) -> bool:
        """Whether it is the body of a loop."""
        return any(caller.word("body") == computation for caller in self._callers[computation])

    @cached_property
    def _callers(self) -> dict[str, list[Instruction]]:
        callers = defaultdict(list)
        for one in self.program.instructions():
            for called in one.names(*_CALLS, "body", "condition"):
                callers[called].append(one)
        return callers

    # Backward, through views -------------------------------------------------------------------------------------

    def _argument(self, value: Value) -> Instruction | None:
        """The entry's parameter of which a value is a view."""
        found = self._parameter(value)
        if found is None:
            return None
        number, index = found
        if value.computation == self.program.entry:
            return self.arguments[number] if index is None else None
        callers = self._callers[value.computation]
        if len(callers) != 1:
            return None
        caller = callers[0]
        if caller.opcode == "while":
            if index is None or not self._invariant(caller.word("body"), index):
                return None
            return self._argument(Value(caller.computation, caller.operands[0], index))
        return self._argument(Value(caller.computation, caller.operands[number], index))

    def _parameter(self, value: Value) -> tuple[int, int | None] | None:
        """(number, index) of the parameter of its own computation of which a value is a view."""
        computation = self.program.computation(value.computation)
        name, index = value.name, value.index
        while (one := computation.get(name)) is not None:
            if one.opcode == "parameter":
                return _number(one), index
            if one.opcode == "get-tuple-element":
                name, index = one.operands[0], int(one.word("index"))
            elif one.opcode == "tuple" and index is not None:
                name, index = one.operands[index], None
            elif one.opcode in _VIEWS:
                name, index = one.operands[0], None
            elif one.opcode == "while" and index is not None and self._invariant(one.word("body"), index):
                name = one.operands[0]
            elif one.opcode in ("fusion", "call"):
                inner = self._parameter(self.result(one.names(*_CALLS)[0], index))
                if inner is None:
                    return None
                name, index = one.operands[inner[0]], inner[1]
            else:
                return None
        return None

    def _invariant(self, body: str, index: int) -> bool:
        """Whether a loop hands on element `index` of what it carries as it got it."""
        return self._parameter(self.result(body, index)) == (0, index)

    def result(self, computation: str, index: int | None = None) -> Value:
        """What a computation returns, or one element of it."""
        return Value(computation, self.program.root(computation).name, index)

    # From the outputs back, element by element -------------------------------------------------------------------

    @cached_property
    def _updates(self) -> dict[int, list[str]]:
        """Line of a collective -> the arguments that what it makes is written over."""
        found = defaultdict(list)
        for output, number in self.program.aliases.items():
            if self.arguments[number].arrays[0].size == 1:
                continue  # counters and sums: of no tensor
            path = argument_path(self.arguments[number])
            for line in self._collectives_behind(self.result(self.program.entry, output)):
                found[line].append(path)
        return {line: _owners(paths) for line, paths in found.items()}

    def _collectives_behind(self, output: Value) -> set[int]:
        seen, lines, todo = set(), set(), [output]
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            one = self.program.computation(value.computation).get(value.name)
            if one is None:
                continue
            if one.opcode.startswith(_COLLECTIVES) and not one.opcode.endswith("-done"):
                lines.add(one.line)
            todo += self.sources(one, value)
        return lines

    def sources(self, one: Instruction, value: Value) -> Iterator[Value]:
        """The values whose elements become those of `value`."""
        here = value.computation
        if one.opcode == "parameter":
            yield from self.from_caller(one, value)
        elif one.opcode == "get-tuple-element":
            yield Value(here, one.operands[0], int(one.word("index")))
        elif one.opcode.startswith(_COLLECTIVES) and one.opcode.endswith("-done"):
            yield Value(here, one.operands[0], value.index)
        elif one.opcode == "tuple" or one.opcode.startswith(_COLLECTIVES):
            number = value.index or 0
            yield from (Value(here, name) for name in one.operands[number : number + 1])
        elif one.opcode in ("fusion", "call"):
            yield self.result(one.names(*_CALLS)[0], value.index)
        elif one.opcode == "while":
            yield self.result(one.word("body"), value.index)
            yield Value(here, one.operands[0], value.index)
        elif one.opcode in _VIEWS or one.opcode == "dynamic-update-slice" or one.opcode.endswith("-done"):
            yield from (Value(here, name) for name in one.operands[:2])
        elif one.opcode not in _MIXES:
            yield from (Value(here, name) for name in one.operands if self._same_size(one, name))

    def from_caller(self, one: Instruction, value: Value) -> Iterator[Value]:
        """What the callers of a computation pass as the parameter `one`."""
        for caller in self._callers[value.computation]:
            number = 0 if caller.opcode == "while" else _number(one)
            yield from (Value(caller.computation, name, value.index) for name in caller.operands[number : number + 1])

    def _same_size(self, one: Instruction, name: str) -> bool:
        operand = self.program.computation(one.computation).get(name)
        return operand is not None and [a.size for a in operand.arrays] == [a.size for a in one.arrays]


def argument_path(one: Instruction) -> str:
    """The dotted path of an argument, from JAX's name for it: `state.params['table']` -> `state.params.table`."""
    return re.sub(r"\[\\?'?([^\]\\']*)\\?'?\]", r".\1", one.op_name) or one.name


def _owners(paths: list[str]) -> list[str]:
    """The paths without those of an optimizer's state, which end as their parameter's, under a longer root."""

    def is_state(path: str) -> bool:
        return any(path.endswith(tail) for other in paths if len(other) < len(path) for tail in _tails(other))

    return [path for path in paths if not is_state(path)]


def _tails(path: str) -> list[str]:
    """The path below its first and below its second name: `params.w` and `state.params.w` have `.w` in common."""
    names = path.split(".")
    return ["." + ".".join(names[i:]) for i in (1, 2) if names[i:]]


def _number(parameter: Instruction) -> int:
    return int(parameter.rest.split(")")[0])
