"""What a device holds while a program runs: arguments by their place in the tree, results, temporaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import jax
import pydantic
from jax.stages import Compiled

from meshpar.inspection.program.flow import argument_path
from meshpar.inspection.program.text import Instruction, Program
from meshpar.inspection.program.walk import Visit

Size = Annotated[int, pydantic.Field(ge=0)]
_MAKES_NOTHING = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "constant", "while", "conditional", "call",
    "optimization-barrier", "after-all", "partition-id", "replica-id",
}  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Args:
      arguments: by the first two names of their path: `state.params`, `state.opt_state`, `batch.tokens`.
      outputs: those that are not written over a donated argument.
      temporaries: what the compiler says that it needs besides, at most at one time.
      peak: what the compiler says is the most at one time; None where it does not (CPU).
    """

    arguments: dict[str, Size]
    outputs: Size
    temporaries: Size
    peak: Size | None

    @property
    def total(self) -> int:
        """The peak; without one, the sum of all, which is an upper bound."""
        return self.peak or sum(self.arguments.values()) + self.outputs + self.temporaries

    def split_arguments(self) -> tuple[dict[str, int], int]:
        """The arguments of at least 0.1% of the total, and the sum of the smaller ones."""
        large = {name: size for name, size in self.arguments.items() if size >= self.total / 1000}
        return large, sum(self.arguments.values()) - sum(large.values())


@dataclass(frozen=True)
class Held:
    """One array on one device.

    Args:
      name: an argument's path; a temporary's name as JAX gives it.
      array: its type, as `f32[8,4]`.
      num_bytes: of the part that the device holds.
      is_argument: or else it is a temporary.
      source: `file:line`, of a temporary.
    """

    name: str
    array: str
    num_bytes: Size
    is_argument: bool
    source: str = ""


def memory(program: Program, compiled: Compiled | None) -> Memory:
    """Reads off a program what it holds.

    Args:
      compiled: where the compiler's own figures come from; without it there are none of temporaries.
    """
    arguments: Counter[str] = Counter()
    for one in _parameters(program):
        arguments[".".join(argument_path(one).split(".")[:2])] += _bytes(one)
    stats = compiled.memory_analysis() if compiled is not None else None
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes if stats else 0
    temporaries, peak = stats.temp_size_in_bytes if stats else 0, _peak(compiled)
    if peak and not temporaries:  # as for TPUs
        temporaries = max(0, peak - sum(arguments.values()) - outputs)
    return Memory(dict(arguments.most_common()), outputs, temporaries, peak)


def largest(program: Program, visits: Iterable[Visit], number: int) -> list[Held]:
    """The largest arguments, and the largest arrays that are made in between; each one `number` at most."""
    given = [Held(argument_path(one), str(one.arrays[0]), _bytes(one), True) for one in _parameters(program)]
    fused = {name for one in program.instructions() if one.opcode == "fusion" for name in one.names("calls")}
    made = {
        visit.instruction.line: visit.instruction
        for visit in visits
        if visit.instruction.opcode not in _MAKES_NOTHING and visit.instruction.computation not in fused
    }
    between = [_temporary(program, one) for one in sorted(made.values(), key=_bytes, reverse=True)[:number]]
    return sorted(given, key=lambda held: held.num_bytes, reverse=True)[:number] + between


def _peak(compiled: Compiled | None) -> int | None:
    stats = compiled.memory_analysis() if compiled is not None else None
    devices = (
        {d.platform for s in jax.tree.leaves(compiled.input_shardings) for d in s.device_set} if compiled else set()
    )
    # XLA's CPU compiler gives the arguments' bytes for a peak.
    return None if stats is None or devices <= {"cpu"} else stats.peak_memory_in_bytes


def _temporary(program: Program, one: Instruction) -> Held:
    biggest = max(one.arrays, key=lambda array: array.num_bytes)
    return Held(one.op_name or one.name, str(biggest), _bytes(one), False, next(program.sources(one), ""))


def _parameters(program: Program) -> list[Instruction]:
    return [one for one in program.computation(program.entry).values() if one.opcode == "parameter"]


def _bytes(one: Instruction) -> int:
    return sum(array.num_bytes for array in one.arrays if array.dtype != "token")
