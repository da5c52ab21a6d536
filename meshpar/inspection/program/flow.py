"""Follows the data flow of a program between its arguments and its collectives.

It answers two questions about a collective. Is its operand a *view* of an argument (a slice of stacked layers, another
dtype or layout)? Then the collective gathers that parameter. Does its result flow, element by element, into an output
that overwrites an argument? Then it reduces that parameter's gradient. Both directions pass through fusions and loops.
Neither passes through arithmetic that mixes elements, so that each answer is correct.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import NamedTuple, TypeVar

from meshpar.inspection.program.text import Instruction, Program

_VIEWS = {
    "copy", "bitcast", "convert", "transpose", "reshape", "slice", "dynamic-slice", "reduce-precision",
    "all-gather", "copy-start", "copy-done", "all-gather-start", "all-gather-done",
}  # fmt: skip
_CALLS = ("calls", "to_apply")
_BRANCHES = ("branch_computations", "false_computation", "true_computation")
_MIXES = {"dot", "convolution", "custom-call", "broadcast", "reduce", "gather", "scatter", "sort", "constant", "iota"}
_COLLECTIVES = ("all-", "reduce-scatter", "collective-permute", "collective-broadcast")
_T = TypeVar("_T")


class Value(NamedTuple):
    """The result of an instruction, or element `index` of a result that is a tuple."""

    computation: str
    name: str
    index: int | None = None


class Flow:
    """The data flow of a program."""

    def __init__(self, program: Program):
        self.program = program

    @cached_property
    def arguments(self) -> dict[int, Instruction]:
        """Number -> parameter of the entry."""
        entry = self.program.computation(self.program.entry).values()
        return {_number(one): one for one in entry if one.opcode == "parameter"}

    def gathers(self, one: Instruction) -> tuple[str, ...]:
        """The paths of the arguments of which an instruction's operands are views."""
        found = (self._argument(Value(one.computation, name)) for name in one.operands)
        return tuple(dict.fromkeys(argument_path(a) for a in found if a is not None))

    def updates(self, one: Instruction) -> tuple[str, ...]:
        """The paths of the arguments that the result of an instruction overwrites."""
        return tuple(self._updates.get(one.line, ()))

    def is_body(self, computation: str) -> bool:
        """Whether a computation is the body of a loop."""
        return any(caller.word("body") == computation for caller in self._callers[computation])

    @cached_property
    def _callers(self) -> dict[str, list[Instruction]]:
        callers = defaultdict(list)
        for one in self.program.instructions():
            for called in one.names(*_CALLS, *_BRANCHES, "body", "condition"):
                callers[called].append(one)
        return callers

    # From a value to an argument, through views ------------------------------------------------------------------

    def _argument(self, value: Value) -> Instruction | None:
        """The parameter of the entry of which a value is a view."""
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
        name = caller.operands[_operand_number(caller, value.computation, number)]
        return self._argument(Value(caller.computation, name, index))

    def _parameter(self, value: Value) -> tuple[int, int | None] | None:
        """(number, index) of the computation's parameter of which a value is a view."""
        computation = self.program.computation(value.computation)
        name = value.name
        index = value.index
        while (one := computation.get(name)) is not None:
            if one.opcode == "parameter":
                return _number(one), index
            if one.opcode == "get-tuple-element":
                name = one.operands[0]
                index = int(one.word("index"))
            elif one.opcode == "tuple" and index is not None:
                name = one.operands[index]
                index = None
            elif one.opcode in _VIEWS:
                name = one.operands[0]
                index = None
            elif one.opcode == "opt-barrier" or (
                one.opcode == "while" and index is not None and self._invariant(one.word("body"), index)
            ):
                name = one.operands[0]
            elif one.opcode in ("fusion", "call"):
                inner = self._parameter(self.result(one.names(*_CALLS)[0], index))
                if inner is None:
                    return None
                number, index = inner
                name = one.operands[number]
            else:
                return None
        return None

    def _invariant(self, body: str, index: int) -> bool:
        """Whether a loop leaves element `index` of its carry unchanged."""
        return self._parameter(self.result(body, index)) == (0, index)

    def result(self, computation: str, index: int | None = None) -> Value:
        """The result of a computation, or one element of it."""
        return Value(computation, self.program.root(computation).name, index)

    # From an output to its collectives, element by element -------------------------------------------------------

    @cached_property
    def _updates(self) -> dict[int, list[str]]:
        """Line of a collective -> paths of the arguments that its result overwrites."""
        found = defaultdict(list)
        for output, number in self.program.aliases.items():
            if self.arguments[number].arrays[0].size == 1:
                continue  # a counter or a sum
            path = argument_path(self.arguments[number])
            behind = reachable([self.result(self.program.entry, output)], self.sources)
            collectives = (one for one in map(self.instruction, behind) if one and starts_collective(one, _COLLECTIVES))
            for line in {one.line for one in collectives}:
                found[line].append(path)
        return {line: _owners(paths) for line, paths in found.items()}

    def instruction(self, value: Value) -> Instruction | None:
        """The instruction that computes a value."""
        return self.program.computation(value.computation).get(value.name)

    def sources(self, value: Value) -> Iterator[Value]:
        """The values whose elements become the elements of `value`."""
        here = value.computation
        one = self.instruction(value)
        if one is None:
            return
        if one.opcode == "parameter":
            yield from self.from_caller(one, value)
        elif one.opcode == "get-tuple-element":
            yield Value(here, one.operands[0], int(one.word("index")))
        elif one.opcode == "opt-barrier" or (one.opcode.startswith(_COLLECTIVES) and one.opcode.endswith("-done")):
            yield Value(here, one.operands[0], value.index)
        elif one.opcode == "tuple" or one.opcode.startswith(_COLLECTIVES):
            number = value.index or 0
            yield from (Value(here, name) for name in one.operands[number : number + 1])
        elif one.opcode in ("fusion", "call"):
            yield self.result(one.names(*_CALLS)[0], value.index)
        elif one.opcode == "conditional":
            yield from (self.result(branch, value.index) for branch in one.names(*_BRANCHES))
        elif one.opcode == "while":
            yield self.result(one.word("body"), value.index)
            yield Value(here, one.operands[0], value.index)
        elif one.opcode in _VIEWS or one.opcode == "dynamic-update-slice" or one.opcode.endswith("-done"):
            yield from (Value(here, name) for name in one.operands[:2])
        elif one.opcode not in _MIXES:
            sizes = [array.size for array in one.arrays]
            for name in one.operands:
                operand = self.instruction(Value(here, name))
                if operand is not None and [array.size for array in operand.arrays] == sizes:
                    yield Value(here, name)

    def from_caller(self, one: Instruction, value: Value) -> Iterator[Value]:
        """The values that the callers of a computation pass as its parameter `one`."""
        for caller in self._callers[value.computation]:
            number = _operand_number(caller, value.computation, _number(one))
            yield from (Value(caller.computation, name, value.index) for name in caller.operands[number : number + 1])


def reachable(start: Iterable[_T], sources: Callable[[_T], Iterable[_T]]) -> Iterator[_T]:
    """The values of `start` and all values that they depend on, each once."""
    todo = list(start)
    seen = set()
    while todo:
        value = todo.pop()
        if value not in seen:
            seen.add(value)
            yield value
            todo += sources(value)


def starts_collective(one: Instruction, opcodes: tuple[str, ...]) -> bool:
    """Whether an instruction is a collective, or the start of one, whose opcode begins with any of `opcodes`."""
    return one.opcode.startswith(opcodes) and not one.opcode.endswith("-done")


def argument_path(one: Instruction) -> str:
    """The dotted path of an argument, such as `state.params.embedding` for JAX's `state.params['embedding']`."""
    return re.sub(r"\[\\?'?([^\]\\']*)\\?'?\]", r".\1", one.op_name) or one.name


def _owners(paths: list[str]) -> list[str]:
    """Removes the paths of optimizer state, which are longer than the path of their parameter and end like it.

    The path of a parameter is compared without its first one or two names: `.w` of `params.w` and `state.params.w`.
    """
    owners = []
    for path in paths:
        shorter = [other.split(".") for other in paths if len(other) < len(path)]
        tails = ["." + ".".join(names[i:]) for names in shorter for i in (1, 2) if names[i:]]
        if not path.endswith(tuple(tails)):
            owners.append(path)
    return owners


def _operand_number(caller: Instruction, computation: str, parameter: int) -> int:
    """The number of the caller's operand that becomes a parameter of the called computation."""
    if caller.opcode == "while":
        return 0
    if caller.opcode != "conditional":
        return parameter
    by_index = caller.names("branch_computations")  # the first operand selects the branch; then each has one
    branches = by_index or [caller.word("true_computation"), caller.word("false_computation")]
    return 1 + branches.index(computation)


def _number(parameter: Instruction) -> int:
    return int(parameter.rest.split(")")[0])
