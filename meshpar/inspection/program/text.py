"""Parses the text of a compiled program into computations of instructions.

XLA prints one instruction per line, except for a Pallas kernel, whose metadata continue on further lines. A loop's
body, a branch, a fusion and an asynchronous call are separate computations. Tables of files and stack frames precede
the first computation. This module does not interpret loops or collectives.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from meshpar.errors import ProgramError

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(
    r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[\w\-]+)\((?P<rest>.*)$"
)
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
LAYOUT = re.compile(r"\{[^}]*\}|/\*.*?\*/")
_PASSED_THROUGH = re.compile(
    r"/(jax|flax|optax|jaxtyping|beartype|meshpar/(mesh|parallel|collectives|sharding|partition|interop))/|^<"
)
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")


@dataclass(frozen=True)
class ArrayType:
    """The type of an array in a program: `f32[8,4]` is `ArrayType("f32", (8, 4))`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        bits = re.match(r"[a-z]+(\d+)", self.dtype.replace("pred", "pred8"))
        if not bits:
            raise ProgramError(f"an array of unknown dtype {self.dtype}")
        return -(-self.size * int(bits[1]) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def arrays_of(type_: str) -> tuple[ArrayType, ...]:
    """The arrays of a type that XLA prints; a tuple has several.

    >>> [str(array) for array in arrays_of("(f32[8,4]{1,0}, /*index=1*/s32[])")]
    ['f32[8,4]', 's32[]']
    """
    found = _ARRAY.findall(LAYOUT.sub("", type_))
    return tuple(ArrayType(dtype, tuple(int(size) for size in shape.split(",") if size)) for dtype, shape in found)


@dataclass(frozen=True)
class Instruction:
    """One instruction of a program.

    Args:
      line: the number of its first line in the text, from 1.
      computation: the name of the computation that contains it.
      type: the type of the result, as XLA prints it: `f32[8,4]{1,0}`, or a tuple of such types.
      rest: the text after `opcode(`: operands, attributes and metadata.
      is_root: whether the computation returns its result.
    """

    line: int
    computation: str
    name: str
    type: str
    opcode: str
    rest: str
    is_root: bool

    @cached_property
    def arrays(self) -> tuple[ArrayType, ...]:
        """The arrays of its result."""
        return arrays_of(self.type)

    @cached_property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest.split(")")[0])

    @property
    def attributes(self) -> str:
        """`rest` without the contents of quotes, which may look like attributes."""
        return unquoted(self.rest)

    @property
    def op_name(self) -> str:
        """JAX's name for the operation of the user's program; empty if XLA added the instruction."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
        return match[1] if match else ""

    def names(self, *attributes: str) -> list[str]:
        """The computations that the given attributes name: `body=%b`, `branch_computations={%b0, %b1}`."""
        if not any(f"{attribute}=" in self.rest for attribute in attributes):
            return []  # a cheap test first, because most instructions call nothing
        found = re.findall(rf"\b(?:{'|'.join(attributes)})=(\{{[^}}]*\}}|[%\w.\-]+)", self.attributes)
        return re.findall(r"[\w.\-]+", " ".join(found))

    def word(self, attribute: str) -> str:
        """The single word after `attribute=`; empty if there is none."""
        return next(iter(self.names(attribute)), "")


class Program:
    """A compiled program, parsed from its text.

    Raises:
      ProgramError: the text is not that of a compiled program.

    >>> program = Program("HloModule m, num_partitions=8\\n\\nENTRY %main () -> s32[] {\\n  ROOT %c = s32[] iota()\\n}")
    >>> program.entry, program.num_devices, program.computation("main")["c"].opcode
    ('main', 8, 'iota')
    """

    def __init__(self, text: str):
        self.lines = text.splitlines()
        self.entry = ""
        self._computations: dict[str, dict[str, Instruction]] = {}
        inside = ""
        for number, line in enumerate(self.lines, start=1):
            if match := _COMPUTATION.match(line):
                inside = match[2]
                self._computations[inside] = {}
                self.entry = inside if match[1] else self.entry
            elif inside and (match := _INSTRUCTION.match(line)):
                name, type_, opcode, rest = match.group("name", "type", "opcode", "rest")
                one = Instruction(number, inside, name, type_, opcode, rest, bool(match["root"]))
                self._computations[inside][name] = one
            elif inside and line.startswith(('"', "}}")):
                last = next(reversed(self._computations[inside].values()))
                self._computations[inside][last.name] = replace(last, rest=f"{last.rest}\n{line}")
        if not self.entry:
            raise ProgramError("the text has no ENTRY computation: it is not that of a compiled program")
        self.num_devices = _num_devices(self.lines[0])

    def computation(self, name: str) -> dict[str, Instruction]:
        """The instructions of a computation, by name.

        Raises:
          ProgramError: the text does not contain the computation.
        """
        if name not in self._computations:
            raise ProgramError(f"the program calls a computation {name!r} that its text does not contain")
        return self._computations[name]

    def instructions(self) -> Iterator[Instruction]:
        """All instructions, in the order of the text."""
        return (one for computation in self._computations.values() for one in computation.values())

    def root(self, name: str) -> Instruction:
        """The instruction whose result a computation returns."""
        return next(one for one in reversed(self.computation(name).values()) if one.is_root)

    @cached_property
    def aliases(self) -> dict[int, int]:
        """Output number -> number of the donated argument whose buffer the output reuses."""
        match = re.search(r"input_output_alias=\{(.*?\)) \}", self.lines[0])
        return {int(out or 0): int(number) for out, number in _ALIAS.findall(match[1])} if match else {}

    def sources(self, one: Instruction) -> Iterator[str]:
        """`file:line` of each stack frame that created an instruction, innermost first."""
        frame = self._row("StackFrames", one.rest, "stack_frame_id")
        while frame:
            location = self._row("FileLocations", frame, "file_location_id")
            file = self._row("FileNames", location, "file_name_id").strip('"')
            line = re.search(r"\bline=(\d+)", location)
            if file and line:
                yield f"{file}:{line[1]}"
            # XLA prints the number of the parent plus one; 1 means no parent.
            parent = re.search(r"parent_frame_id=(\d+)", frame)
            frame = self._tables["StackFrames"].get(str(int(parent[1]) - 1), "") if parent else ""

    def source(self, one: Instruction) -> str:
        """`file:line` of the innermost frame of a model or layer; without such a frame, of the innermost one."""
        frames = list(self.sources(one))
        return next((frame for frame in frames if not _PASSED_THROUGH.search(frame)), next(iter(frames), ""))

    def _row(self, title: str, text: str, key: str) -> str:
        """The row of table `title` whose number follows `key=` in `text`; empty if there is none."""
        number = re.search(rf"\b{key}=(\d+)", text)
        return self._tables.get(title, {}).get(number[1], "") if number else ""

    @cached_property
    def _tables(self) -> dict[str, dict[str, str]]:
        """The tables that precede the first computation: title -> number -> row."""
        tables = {}
        for title in ("StackFrames", "FileLocations", "FileNames"):
            if title in self.lines:
                rows = itertools.takewhile(str.strip, self.lines[self.lines.index(title) + 1 :])
                tables[title] = dict(row.split(" ", 1) for row in rows)
        return tables


def _num_devices(header: str) -> int:
    """The number of devices that run the program; replica groups number them from 0."""
    if re.search(r"\breplica_count=(?!1\b)", unquoted(header)):
        raise ProgramError("the program has several replicas, as pmap makes them, instead of partitions: use jit")
    match = re.search(r"\bnum_partitions=(\d+)", unquoted(header))
    return int(match[1]) if match else 1


def unquoted(text: str) -> str:
    """The text without the contents of its quotes."""
    return _QUOTED.sub('""', text)
