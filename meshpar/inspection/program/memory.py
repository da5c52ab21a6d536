"""Reads the memory that a compiled program needs on a device: arguments, outputs and temporaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import jax
import pydantic
from jax.stages import Compiled

from meshpar.inspection.program.flow import Flow, argument_path
from meshpar.inspection.program.text import Instruction
from meshpar.inspection.program.walk import Visit

Count = Annotated[int, pydantic.Field(ge=0)]
_ALLOCATES_NOTHING = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "constant", "while", "conditional", "call",
    "opt-barrier", "after-all", "partition-id", "replica-id",
}  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Args:
      arguments: by the first two names of their paths: `state.params`, `state.opt_state`, `batch.tokens`.
      outputs: the outputs that do not overwrite a donated argument.
      temporaries: the largest sum of temporary buffers at one time, as the compiler reports it.
      peak: the largest sum of all buffers at one time, as the compiler reports it; None on CPU, which reports none.
      host: temporaries in the host's memory, such as offloaded activations; the other figures exclude them. 0 on CPU,
        where device and host have the same memory.
    """

    arguments: dict[str, Count]
    outputs: Count
    temporaries: Count
    peak: Count | None
    host: Count = 0

    @property
    def total(self) -> int:
        """The peak; if it is unknown, the sum of all kinds, which is an upper bound."""
        return self.peak or sum(self.arguments.values()) + self.outputs + self.temporaries

    def kinds(self) -> dict[str, int]:
        """The bytes of each kind that there is. Arguments below 0.1% of the total are one kind."""
        found = {name: size for name, size in self.arguments.items() if size >= self.total / 1000}
        others = sum(self.arguments.values()) - sum(found.values())
        found |= {"other arguments": others, "outputs": self.outputs, "temporaries": self.temporaries}
        return {name: size for name, size in found.items() if size}


@dataclass(frozen=True)
class Held:
    """One array on one device.

    Args:
      name: the path of an argument; JAX's name for a temporary.
      array: its type, such as `f32[8,4]`.
      num_bytes: the size of the device's part of it.
      is_argument: whether it is an argument; otherwise it is a temporary.
      source: `file:line` of the code that computes a temporary.
    """

    name: str
    array: str
    num_bytes: Count
    is_argument: bool
    source: str = ""


def memory(flow: Flow, compiled: Compiled | None) -> Memory:
    """The memory of a program, by kind.

    Args:
      compiled: the program with the compiler's own figures. Without it, outputs and temporaries are 0.
    """
    arguments: Counter[str] = Counter()
    for one in flow.arguments.values():
        arguments[".".join(argument_path(one).split(".")[:2])] += _bytes(one)
    by_size = dict(arguments.most_common())
    stats = compiled.memory_analysis() if compiled is not None else None
    if compiled is None or stats is None:
        return Memory(by_size, 0, 0, None)
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    platforms = {d.platform for s in jax.tree.leaves(compiled.input_shardings) for d in s.device_set}
    # XLA's CPU compiler reports the bytes of the arguments as the peak.
    peak = None if platforms <= {"cpu"} else stats.peak_memory_in_bytes
    temporaries = stats.temp_size_in_bytes
    if peak and not temporaries:  # on TPU
        temporaries = max(0, peak - sum(arguments.values()) - outputs)
    return Memory(by_size, outputs, temporaries, peak, stats.host_temp_size_in_bytes)


def largest(flow: Flow, visits: Iterable[Visit], number: int) -> list[Held]:
    """The largest arguments, and the largest temporaries: at most `number` of each."""
    program = flow.program
    arguments = [Held(argument_path(one), str(one.arrays[0]), _bytes(one), True) for one in flow.arguments.values()]
    fused = {name for one in program.instructions() if one.opcode == "fusion" for name in one.names("calls")}
    made = {
        visit.instruction.line: visit.instruction
        for visit in visits
        if visit.instruction.opcode not in _ALLOCATES_NOTHING and visit.instruction.computation not in fused
    }
    found = sorted(arguments, key=lambda held: held.num_bytes, reverse=True)[:number]
    for one in sorted(made.values(), key=_bytes, reverse=True)[:number]:
        array = max(one.arrays, key=lambda array: array.num_bytes)
        source = next(program.sources(one), "")
        found.append(Held(one.op_name or one.name, str(array), _bytes(one), False, source))
    return found


def _bytes(one: Instruction) -> int:
    return sum(array.num_bytes for array in one.arrays if array.dtype != "token")
