"""Finds donated buffers that a program does not reuse, or copies before it overwrites them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshpar.inspection.findings.finding import Finding
from meshpar.inspection.program.arguments import Passed
from meshpar.inspection.program.flow import Flow
from meshpar.inspection.program.text import Instruction, Program

_STRUCTURE = {"tuple", "get-tuple-element", "bitcast"}
_VIEWS = {"copy", "bitcast", "convert", "reshape"}
# Operations that do not compute element by element, or are unknown, even if the result has the operand's size.
_MIXES = {
    "reverse", "transpose", "gather", "scatter", "sort", "dot", "concatenate", "pad", "custom-call", "while", "call",
    "conditional", "all-to-all", "collective-permute",
}  # fmt: skip


def find_copied(flow: Flow, taken: Iterable[Passed]) -> Iterator[Finding]:
    """Donated arguments that need a second buffer nevertheless.

    XLA's CPU compiler also copies an array that two elementwise loops read, such as an optimizer's moments. Other
    compilers fuse such loops, so these copies are no findings.
    """
    program = flow.program
    for one in taken:
        if not one.donated or flow.arguments[one.number].arrays[0].size <= 1:
            continue
        if one.number not in program.aliases.values():
            what = "no output reuses its buffer"
            fix = "give an output its shape, dtype and sharding, or do not donate it"
        elif (reader := _reader(program, flow.arguments[one.number])) is not None:
            source = program.source(reader)
            what = f"it is copied first, because its old value is still read{f' at {source}' if source else ''}"
            fix = "read the old value only before the new one is written"
        else:
            continue
        yield Finding("donation_copied", f"{one.path} is donated, but {what}", one.path, one.num_bytes, fix)


def _reader(program: Program, argument: Instruction) -> Instruction | None:
    """An instruction that reads a copy of the argument's buffer and mixes its elements; None if there is none."""
    entry = program.computation(program.entry)
    copies = {argument.name}
    for one in entry.values():
        if one.opcode == "copy" and one.operands[0] in copies and one.type == argument.type:
            copies.add(one.name)
    copies.discard(argument.name)
    readers = (one for one in entry.values() for name in one.operands if name in copies and one.name not in copies)
    return next((one for one in readers if _mixes(program, one, copies)), None)


def _mixes(program: Program, one: Instruction, names: set[str]) -> bool:
    """Whether an element of the result depends on elements at other positions of the named operands."""
    if one.opcode in _STRUCTURE:
        return False
    if one.opcode == "fusion":
        return _mixes_inside(program, one, names)
    computation = program.computation(one.computation)
    sizes = {computation[name].arrays[0].size for name in one.operands if name in names}
    return one.opcode in _MIXES or sizes != {one.arrays[0].size}


def _mixes_inside(program: Program, fusion: Instruction, names: set[str]) -> bool:
    inside = program.computation(fusion.word("calls"))
    read = {f"{number})" for number, name in enumerate(fusion.operands) if name in names}
    reached = {one.name for one in inside.values() if one.opcode == "parameter" and one.rest.split(",")[0] in read}
    for one in inside.values():
        if reached.intersection(one.operands):
            if _mixes(program, one, reached):
                return True
            if one.opcode in _VIEWS:  # arithmetic computes the new value a second time
                reached.add(one.name)
    return False
