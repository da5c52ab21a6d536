"""Inspects a compiled program: its communication, FLOPs and memory, as text and as data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

from jax.stages import Compiled

from meshpar.inspection.findings.find import THRESHOLD_BYTES, Reading, find
from meshpar.inspection.findings.finding import Finding
from meshpar.inspection.findings.planned import Planned
from meshpar.inspection.program.flops import opaque_calls, product_flops
from meshpar.inspection.program.flow import Flow
from meshpar.inspection.program.hlo import Collective, found_in, total_sent_bytes
from meshpar.inspection.program.memory import Held, Memory, largest, memory
from meshpar.inspection.program.text import Program
from meshpar.inspection.program.walk import walk
from meshpar.inspection.report.places import axes_name
from meshpar.inspection.report.plain import plain
from meshpar.inspection.report.text import text
from meshpar.sharding.resolve import AnyMesh

NUM_LARGEST = 8


@dataclass(frozen=True)
class Inspection:
    """The communication, FLOPs and memory of a compiled program, on one device and in one call.

    Args:
      axes: the sizes of the mesh's axes; empty without a mesh.
      collectives: the collectives, in the order of the program.
      flops: FLOPs of matrix products and convolutions.
      memory: bytes by kind.
      largest: the largest arguments and temporaries.
      opaque: targets of custom calls, whose FLOPs and communication are not counted.
      traced: bytes that the traced step of a run sends over each combination of axes; None if they are unknown.
      model_states: bytes of parameters, gradients and optimizer state, from the placements of a run.
      selected: key of a run's config -> the implementation that it selects.
      findings: operations that the author probably did not intend, the most expensive first.
    """

    axes: dict[str, int]
    collectives: tuple[Collective, ...]
    flops: int
    memory: Memory
    largest: tuple[Held, ...]
    opaque: tuple[str, ...]
    traced: dict[str, int] | None = None
    model_states: dict[str, int] | None = None
    selected: dict[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def bytes_per_axis(self) -> dict[str, int]:
        """Bytes sent over each combination of axes, such as `fsdp, tensor`; without a mesh, over `unknown axes`."""
        sent: dict[str, Fraction] = defaultdict(Fraction)
        for one in self.collectives:
            sent[axes_name(one.axes)] += one.total_bytes
        return {axes: round(num_bytes) for axes, num_bytes in sent.items()}

    def as_json(self) -> dict[str, Any]:
        """The inspection as plain data."""
        return {
            "mesh": self.axes,
            "sent_bytes": round(total_sent_bytes(self.collectives)),
            "sent_bytes_per_axis": self.bytes_per_axis,
            "traced_bytes_per_axis": self.traced,
            "collectives": [_entry(one) for one in self.collectives],
            "flops": self.flops,
            "memory": asdict(self.memory) | {"total": self.memory.total},
            "model_states": self.model_states,
            "selected": self.selected,
            "largest": [asdict(held) for held in self.largest],
            "opaque": list(self.opaque),
            "findings": [one.as_json() for one in self.findings],
        }

    def __str__(self) -> str:
        return text(plain(self.as_json()))


def inspect(
    compiled: Compiled | str,
    mesh: AnyMesh | None = None,
    *,
    warnings: Iterable[str] = (),
    planned: Planned | None = None,
    threshold_bytes: int = THRESHOLD_BYTES,
) -> Inspection:
    """Inspects a compiled program.

    Args:
      compiled: any program that JAX compiled for one or more devices, or its text. The text alone contains neither the
        size of temporaries nor findings about arguments and outputs.
      mesh: the mesh that the program was compiled for; its axes are named in the report.
      warnings: XLA's messages from the compilation, see `compiling`.
      planned: the gathers, reductions and whole arrays that are intended, and therefore no findings.
      threshold_bytes: the least size of an array whose replication, or whose gather without `planned`, is a finding.

    Raises:
      ProgramError: lists every collective that could not be counted.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((16, 16))).compile()
      >>> inspect(compiled).flops
      8192
    """
    executable = None if isinstance(compiled, str) else compiled
    program = Program(compiled if isinstance(compiled, str) else compiled.as_text() or "")
    visits = list(walk(program))
    flow = Flow(program)
    found = tuple(found_in(flow, visits, mesh))
    return Inspection(
        axes={} if mesh is None else dict(mesh.shape),
        collectives=found,
        flops=product_flops(program, visits),
        memory=memory(flow, executable),
        largest=tuple(largest(flow, visits, NUM_LARGEST)),
        opaque=opaque_calls(visits),
        findings=find(Reading(flow, found, executable, mesh, warnings), planned, threshold_bytes),
    )


def _entry(one: Collective) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "axes": None if one.axes is None else list(one.axes),
        "is_in_parts": one.is_in_parts,
        "group_size": one.group_size,
        "times": int(one.times) if one.times.denominator == 1 else float(one.times),
        "branches": list(one.branches),
        "arrays": [str(array) for array in one.arrays],
        "sent_bytes": float(one.sent_bytes),
        "tensors": list(one.tensors),
        "source": one.source,
        "op_name": one.op_name,
    }
