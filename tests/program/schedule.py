"""What a scheduled program does while a chunk is on its way, read from its text."""

from __future__ import annotations

from collections.abc import Iterator

from meshpar.inspection.program.text import Instruction, Program

PRODUCTS = ("dot", "convolution")


def hides(text: str) -> list[bool]:
    """For each asynchronous permute, in the order of their starts, whether a product is computed before it is done.

    A permute that is not asynchronous hides nothing: False.
    """
    program = Program(text)
    assert "is_scheduled=true" in program.lines[0], "the order of the lines is that of the machine"
    computations = {one.computation for one in program.instructions()}
    return [hidden for name in computations for hidden in _hides(program, list(program.computation(name).values()))]


def _hides(program: Program, lines: list[Instruction]) -> Iterator[bool]:
    for at, one in enumerate(lines):
        if one.opcode == "collective-permute":
            yield False
        if one.opcode == "collective-permute-start":
            done = next(i for i, other in enumerate(lines) if one.name in other.operands)
            yield any(_multiplies(program, other) for other in lines[at:done])


def _multiplies(program: Program, one: Instruction) -> bool:
    if one.opcode != "fusion":
        return one.opcode in PRODUCTS
    return any(_multiplies(program, inner) for inner in program.computation(one.word("calls")).values())
