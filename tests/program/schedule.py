"""Whether a scheduled program computes products while it sends a chunk, read from its text."""

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
    computations = {instruction.computation for instruction in program.instructions()}
    return [hidden for name in computations for hidden in _hides(program, list(program.computation(name).values()))]


def _hides(program: Program, lines: list[Instruction]) -> Iterator[bool]:
    for at, instruction in enumerate(lines):
        if instruction.opcode == "collective-permute":
            yield False
        if instruction.opcode == "collective-permute-start":
            done = next(i for i, other in enumerate(lines) if instruction.name in other.operands)
            yield any(_multiplies(program, other) for other in lines[at:done])


def _multiplies(program: Program, instruction: Instruction) -> bool:
    if instruction.opcode != "fusion":
        return instruction.opcode in PRODUCTS
    return any(_multiplies(program, inner) for inner in program.computation(instruction.word("calls")).values())
