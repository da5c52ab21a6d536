"""Every instruction that a program executes, with how often it does.

Loops multiply by their trip counts. XLA states them on CPU and GPU; on TPU they follow from the loop's counter: where
it starts, its step, and the limit of the condition. All three are needed: XLA peels the first turn off some loops,
which then start at 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from meshpar.inspection.program.text import Instruction, Program

_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_TAKEN = re.compile(r"taken_(\d+)_of_(\d+)/cond$")
_CALLS = ("to_apply", "calls", "called_computations")
_BRANCHES = ("branch_computations", "true_computation", "false_computation")


@dataclass(frozen=True)
class Visit:
    """An instruction on one path from the entry.

    Args:
      times: how often one call of the program executes it on this path, if every conditional takes its branch, or
        does so as often as its name says (`taken_8_of_30`); None in a loop whose length the text does not tell.
      branches: the computations of conditionals that it stands in, outermost first.
    """

    instruction: Instruction
    times: int | None
    branches: tuple[str, ...]


def walk(program: Program) -> Iterator[Visit]:
    """Every instruction that the entry reaches, once for each path to it."""
    return _walk(program, program.entry, 1, ())


def _walk(program: Program, name: str, times: int | None, branches: tuple[str, ...]) -> Iterator[Visit]:
    for one in program.computation(name).values():
        yield Visit(one, times, branches)
        if one.opcode == "while":
            trips = trip_count(program, one)
            yield from _walk(program, one.word("body"), _product(times, trips), branches)
            # The condition is asked once more than the body runs.
            asked = None if trips is None else trips + 1
            yield from _walk(program, one.word("condition"), _product(times, asked), branches)
        # The start of an asynchronous call and its end can both name what is called: it runs once.
        elif not one.opcode.endswith(("-done", "-update")):
            for called in one.names(*_CALLS):
                yield from _walk(program, called, times, branches)
            for branch in one.names(*_BRANCHES):
                yield from _walk(program, branch, _taken(one, times), (*branches, branch))


def _taken(conditional: Instruction, times: int | None) -> int | None:
    """How often a branch is taken: whoever knows writes it into the scope of the conditional."""
    said = _TAKEN.search(conditional.op_name)
    return times * int(said[1]) // int(said[2]) if said and times is not None else times


def _product(times: int | None, trips: int | None) -> int | None:
    return None if times is None or trips is None else times * trips


def trip_count(program: Program, loop: Instruction) -> int | None:
    """How often the body of a `while` runs; None if the text does not tell."""
    if known := _KNOWN_TRIPS.search(loop.rest):
        return int(known[1])
    outside, condition, body = map(program.computation, (loop.computation, loop.word("condition"), loop.word("body")))
    less = program.root(loop.word("condition"))
    if less.opcode != "compare" or less.word("direction") != "LT":
        return None
    counter, limit = _carried(condition, less.operands[0]), _constant(condition, less.operands[1])
    if counter is None or limit is None:
        return None
    start = _constant(outside, _element(outside, loop.operands[0], counter))
    step = _step(body, program.root(loop.word("body")), counter)
    if start is None or step is None or step < 1:
        return None
    return max(0, -(-(limit - start) // step))


_Computation = dict[str, Instruction]


def _step(body: _Computation, root: Instruction, counter: int) -> int | None:
    """The constant that the body adds to element `counter` of what it carries."""
    added = _resolve(body, _element(body, root.name, counter))
    if added is None or added.opcode != "add" or _carried(body, added.operands[0]) != counter:
        return None
    return _constant(body, added.operands[1])


def _carried(within: _Computation, name: str) -> int | None:
    """Which element of the loop's carry, the parameter of a computation, `name` is."""
    one = _resolve(within, name)
    if one is None or one.opcode != "get-tuple-element" or within[one.operands[0]].opcode != "parameter":
        return None
    return int(one.word("index"))


def _element(within: _Computation, name: str, index: int) -> str | None:
    made = _resolve(within, name)
    return made.operands[index] if made and made.opcode == "tuple" else None


def _constant(within: _Computation, name: str | None) -> int | None:
    one = _resolve(within, name)
    number = re.match(r"(-?\d+)\)", one.rest) if one and one.opcode == "constant" else None
    return int(number[1]) if number else None


def _resolve(within: _Computation, name: str | None) -> Instruction | None:
    """The instruction behind a name, seen through copies."""
    one = within.get(name or "")
    while one and one.opcode == "copy":
        one = within.get(one.operands[0])
    return one
