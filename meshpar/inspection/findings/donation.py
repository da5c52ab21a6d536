"""Donated buffers that a program does not write over, or copies before it does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshpar.inspection.findings.finding import Finding
from meshpar.inspection.program.arguments import Passed
from meshpar.inspection.program.flow import Flow
from meshpar.inspection.program.text import Instruction, Program

_STRUCTURE = {"tuple", "get-tuple-element", "bitcast"}
_VIEWS = {"copy", "bitcast", "convert", "reshape"}
# What makes an array of the same size, but not element by element, or is not seen into.
_MIXES = {
    "reverse", "transpose", "gather", "scatter", "sort", "dot", "concatenate", "pad", "custom-call", "while", "call",
    "conditional", "all-to-all", "collective-permute",
}  # fmt: skip


def find_copied(program: Program, flow: Flow, given: Iterable[Passed]) -> Iterator[Finding]:
    """Donated arguments that cost a second buffer all the same.

    XLA's CPU compiler also copies an array that two elementwise loops read, where other compilers make one loop of
    them (an optimizer's moments): its own doing, of which there is no finding.
    """
    for one in given:
        if not one.donated or flow.arguments[one.number].arrays[0].size <= 1:
            continue
        if one.number not in program.aliases.values():
            what = "no output is written over it"
            fix = "give an output its shape, dtype and sharding, or do not donate it"
        elif (reader := _reader(program, flow.arguments[one.number])) is not None:
            at = program.source(reader)
            what = f"it is copied first, for its old value is still read{f' at {at}' if at else ''}"
            fix = "read the old value only before the new one is written"
        else:
            continue
        yield Finding("donation_copied", f"{one.path} is donated, but {what}", one.path, one.num_bytes, fix)


def _reader(program: Program, argument: Instruction) -> Instruction | None:
    """What reads a copy of the argument's buffer and mixes its elements; None if there is no copy or no such reader."""
    entry = program.computation(program.entry)
    copies = {argument.name}
    for one in entry.values():
        if one.opcode == "copy" and one.operands[0] in copies and one.type == argument.type:
            copies.add(one.name)
    copies.discard(argument.name)
    readers = (one for one in entry.values() for name in one.operands if name in copies and one.name not in copies)
    return next((one for one in readers if _mixes(program, one, copies)), None)


def _mixes(program: Program, one: Instruction, names: set[str]) -> bool:
    """Whether an instruction makes elements of others than those at their places, of the operands that are named."""
    if one.opcode in _STRUCTURE:
        return False
    if one.opcode == "fusion":
        return _mixes_inside(program, one, names)
    here = program.computation(one.computation)
    sizes = {here[name].arrays[0].size for name in one.operands if name in names}
    return one.opcode in _MIXES or sizes != {one.arrays[0].size}


def _mixes_inside(program: Program, fusion: Instruction, names: set[str]) -> bool:
    inside = program.computation(fusion.word("calls"))
    read = {f"{number})" for number, name in enumerate(fusion.operands) if name in names}
    reached = {one.name for one in inside.values() if one.opcode == "parameter" and one.rest.split(",")[0] in read}
    for one in inside.values():
        if reached.intersection(one.operands):
            if _mixes(program, one, reached):
                return True
            if one.opcode in _VIEWS:  # what arithmetic makes is the new value, computed a second time
                reached.add(one.name)
    return False
