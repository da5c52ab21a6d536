"""Finds collectives that XLA:CPU may run beside a loop or a conditional that communicates too.

XLA:CPU begins the collectives of a computation in its order, each when its operands are known. A loop counts as begun
while it runs. So the first collective after it has to need a result of it, or the two may meet in another order on each
device. See `meshpar.parallel.xla`. Barriers order nothing: they are followed through to each array.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from meshpar.inspection.program.hlo import KINDS
from meshpar.inspection.program.text import Instruction, Program

Needs = frozenset[str]
"""The names of instructions of a computation that have to end before an array is known."""


def unordered(program: Program) -> list[tuple[Instruction, Instruction]]:
    """Pairs (a loop or conditional, a collective or the next loop that may begin before it has ended)."""
    assert "is_scheduled=true" in program.lines[0]

    @cache
    def communicates(computation: str) -> bool:
        return any(begins(one) or calls(one) for one in program.computation(computation).values())

    def begins(one: Instruction) -> bool:
        return one.opcode.removesuffix("-start") in KINDS

    def calls(one: Instruction) -> bool:
        named = one.names("body", "branch_computations", "true_computation", "false_computation")
        named += one.names("to_apply") if one.opcode == "call" else []
        return any(map(communicates, named))

    def found_in(computation: str) -> Iterator[tuple[Instruction, Instruction]]:
        needs: dict[str, list[Needs]] = {}  # of each array of a result
        running: list[Instruction] = []
        ended: Needs = frozenset()
        for one in program.computation(computation).values():
            operands = [needs[name] for name in one.operands]
            all_needs = frozenset().union(*(array for arrays in operands for array in arrays))
            if begins(one) or calls(one):
                ended |= all_needs
                yield from ((loop, one) for loop in running if loop.name not in ended)
            if calls(one):
                running.append(one)
            if one.opcode == "tuple":
                needs[one.name] = [frozenset().union(*arrays) for arrays in operands]
            elif one.opcode == "opt-barrier":
                needs[one.name] = operands[0]
            elif one.opcode == "get-tuple-element":
                index = int(one.rest.split("index=")[1].split(",")[0])
                needs[one.name] = [operands[0][index]]
            else:
                needs[one.name] = [all_needs | {one.name}] * max(1, len(one.arrays))

    reached = {one.computation for one in program.instructions()}
    return [pair for computation in reached for pair in found_in(computation)]
