"""Walks the instructions that a program executes, and counts how often each one runs.

A loop runs its body as often as its trip count says. XLA prints trip counts on CPU and GPU. On TPU they are computed
from the start, the step and the limit of the loop's counter. XLA peels the first iteration off some loops, so the start
may be 1. If data decide how often a loop runs, its scope states the expected number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from meshpar.inspection.program.text import Instruction, Program
from meshpar.parallel.scopes import times_of_branches, times_of_loop

_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLS = ("to_apply", "calls", "called_computations")


@dataclass(frozen=True)
class Visit:
    """An instruction on one path from the entry.

    Args:
      times: how often one call of the program executes it on this path. Every branch counts as taken, or as often as
        the scope of its conditional states, for all branches (`taken_8_of_30`) or for each (`taken_8_10_12_of_30`);
        that is a mean over the devices, and may be a fraction. None in a loop of unknown length.
      branches: the branches of conditionals that contain it, outermost first.
    """

    instruction: Instruction
    times: Fraction | None
    branches: tuple[str, ...]


def walk(program: Program) -> Iterator[Visit]:
    """Yields every instruction that the entry reaches, once for each path to it."""
    return _walk(program, program.entry, Fraction(1), ())


def _walk(program: Program, name: str, times: Fraction | None, branches: tuple[str, ...]) -> Iterator[Visit]:
    for one in program.computation(name).values():
        yield Visit(one, times, branches)
        if one.opcode == "while":
            trips = trip_count(program, one)
            yield from _walk(program, one.word("body"), _product(times, trips), branches)
            # The condition runs once more than the body.
            checks = None if trips is None else trips + 1
            yield from _walk(program, one.word("condition"), _product(times, checks), branches)
        # The start and the end of an asynchronous call can both name the computation, which runs once.
        elif not one.opcode.endswith(("-done", "-update")):
            for called in one.names(*_CALLS):
                yield from _walk(program, called, times, branches)
            for branch, taken in _taken(one, times) if one.opcode == "conditional" else ():
                yield from _walk(program, branch, taken, (*branches, branch))


def _taken(one: Instruction, times: Fraction | None) -> Iterable[tuple[str, Fraction | None]]:
    """The branches of a conditional in the order of its index, and how often each runs if it runs `times`."""
    false, true = (one.names(f"{name}_computation") for name in ("false", "true"))
    branches = one.names("branch_computations") or false + true
    stated = times_of_branches(one.op_name)
    if not branches or not stated or times is None:
        return [(branch, times) for branch in branches]
    taken = [times * each for each in stated]
    return zip(branches, taken if len(taken) > 1 else taken * len(branches), strict=True)


def _product(times: Fraction | None, trips: int | None) -> Fraction | None:
    return None if times is None or trips is None else times * trips


def trip_count(program: Program, loop: Instruction) -> int | None:
    """The number of times that the body of a `while` runs, or is expected to run; None if neither is known."""
    if known := _KNOWN_TRIPS.search(loop.rest):
        return int(known[1])
    if (expected := times_of_loop(loop.op_name)) is not None:
        return expected
    outside = program.computation(loop.computation)
    condition = program.computation(loop.word("condition"))
    body = program.computation(loop.word("body"))
    less = program.root(loop.word("condition"))
    if less.opcode != "compare" or less.word("direction") != "LT":
        return None
    counter = _carried(condition, less.operands[0])
    limit = _constant(condition, less.operands[1])
    if counter is None or limit is None:
        return None
    start = _constant(outside, _element(outside, loop.operands[0], counter))
    step = _step(body, program.root(loop.word("body")), counter)
    if start is None or step is None or step < 1:
        return None
    return max(0, -(-(limit - start) // step))


_Computation = dict[str, Instruction]


def _step(body: _Computation, root: Instruction, counter: int) -> int | None:
    """The constant that the body adds to element `counter` of the carry; None if it does anything else."""
    added = _resolve(body, _element(body, root.name, counter))
    if added is None or added.opcode != "add" or _carried(body, added.operands[0]) != counter:
        return None
    return _constant(body, added.operands[1])


def _carried(within: _Computation, name: str) -> int | None:
    """The index of `name` in the carry, which is the computation's parameter; None if it is no element of it."""
    one = _resolve(within, name)
    if one is None or one.opcode != "get-tuple-element" or within[one.operands[0]].opcode != "parameter":
        return None
    return int(one.word("index"))


def _element(within: _Computation, name: str, index: int) -> str | None:
    """The name of element `index` of a tuple."""
    one = _resolve(within, name)
    return one.operands[index] if one and one.opcode == "tuple" else None


def _constant(within: _Computation, name: str | None) -> int | None:
    """The value of an integer constant; None if `name` is something else."""
    one = _resolve(within, name)
    number = re.match(r"(-?\d+)\)", one.rest) if one and one.opcode == "constant" else None
    return int(number[1]) if number else None


def _resolve(within: _Computation, name: str | None) -> Instruction | None:
    """The instruction of that name; for a copy, the instruction that it copies."""
    one = within.get(name or "")
    while one and one.opcode == "copy":
        one = within.get(one.operands[0])
    return one
