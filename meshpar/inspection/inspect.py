"""What a compiled program communicates, computes and holds: one reading for people and programs alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from jax.stages import Compiled

from meshpar.inspection.findings.find import THRESHOLD_BYTES, Reading, find
from meshpar.inspection.findings.finding import Finding, Planned
from meshpar.inspection.program.flops import opaque_calls, product_flops
from meshpar.inspection.program.flow import Flow
from meshpar.inspection.program.hlo import Collective, found_in, total_sent_bytes
from meshpar.inspection.program.memory import Held, Memory, largest, memory
from meshpar.inspection.program.text import Program
from meshpar.inspection.program.walk import walk
from meshpar.inspection.report.places import axes_name, places, short_source
from meshpar.inspection.report.table import table
from meshpar.mesh.layout import describe_sizes
from meshpar.sharding.resolve import AnyMesh
from meshpar.tree import human_bytes

NUM_LARGEST = 8


@dataclass(frozen=True)
class Inspection:
    """A program, judged from its text alone. All figures are of one device and one call.

    Args:
      axes: the sizes of the mesh's axes; empty without a mesh.
      collectives: in the order of the program.
      flops: of matrix products and convolutions.
      memory: what it holds.
      largest: the largest arguments and temporaries.
      opaque: targets of custom calls, into which nobody sees.
      traced: bytes over each combination of axes, as the presets of a run say; None if they do not.
      model_states: bytes of parameters, gradients and optimizer state, as a run's placements say.
      findings: what its author hardly meant, the most expensive first.
    """

    axes: dict[str, int]
    collectives: tuple[Collective, ...]
    flops: int
    memory: Memory
    largest: tuple[Held, ...]
    opaque: tuple[str, ...]
    traced: dict[str, int] | None = None
    model_states: dict[str, int] | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def bytes_per_axis(self) -> dict[str, int]:
        """Bytes sent over each combination of axes, as `fsdp, tensor`; `unknown axes` where no mesh names them."""
        sent: dict[str, Fraction] = defaultdict(Fraction)
        for one in self.collectives:
            sent[axes_name(one.axes)] += one.times * one.sent_bytes
        return {axes: round(bytes_) for axes, bytes_ in sent.items()}

    def as_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "mesh": self.axes,
            "sent_bytes": round(total_sent_bytes(self.collectives)),
            "sent_bytes_per_axis": self.bytes_per_axis,
            "traced_bytes_per_axis": self.traced,
            "collectives": [_entry(one) for one in self.collectives],
            "flops": self.flops,
            "memory": asdict(self.memory) | {"total": self.memory.total},
            "model_states": self.model_states,
            "largest": [asdict(held) for held in self.largest],
            "opaque": list(self.opaque),
            "findings": [one.as_json() for one in self.findings],
        }

    def __str__(self) -> str:
        parts = [f"mesh: {describe_sizes(self.axes)}"] if self.axes else []
        parts += [
            _communication(self.collectives),
            _per_axis(self.bytes_per_axis, self.traced),
            f"matrix products: {self.flops:,} FLOPs",
            _memory(self.memory),
            *([_states(self.model_states)] if self.model_states else []),
        ]
        parts += [_largest([held for held in self.largest if held.is_argument], "largest arguments")]
        parts += [_largest([held for held in self.largest if not held.is_argument], "largest temporaries")]
        parts += [f"custom calls, whose insides nobody sees: {', '.join(self.opaque)}"] if self.opaque else []
        parts += [_findings(self.findings)] if self.findings else []
        return "\n\n".join(["a device, in one step", *parts])


def inspect(
    compiled: Compiled | str,
    mesh: AnyMesh | None = None,
    *,
    warnings: Iterable[str] = (),
    planned: Planned | None = None,
    threshold_bytes: int = THRESHOLD_BYTES,
) -> Inspection:
    """Reads a compiled program.

    Args:
      compiled: any program that JAX compiled for one or more devices, or its text; the text alone does not tell
        the temporaries, nor what is found of arguments and outputs.
      mesh: the mesh it was compiled for, which names the axes.
      warnings: what XLA said while it compiled, see `compiling`.
      planned: what its author means it to gather, reduce and hold whole, so that it is no finding.
      threshold_bytes: of the smallest array on which findings remark though no plan speaks of it.

    Raises:
      ProgramError: lists every collective that could not be counted.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((16, 16))).compile()
      >>> inspect(compiled).flops
      8192
    """
    executable = None if isinstance(compiled, str) else compiled
    program = Program(compiled if isinstance(compiled, str) else compiled.as_text() or "")
    visits, flow = list(walk(program)), Flow(program)
    found = tuple(found_in(program, visits, mesh, flow))
    return Inspection(
        axes={} if mesh is None else dict(mesh.shape),
        collectives=found,
        flops=product_flops(program, visits),
        memory=memory(program, executable),
        largest=tuple(largest(program, visits, NUM_LARGEST)),
        opaque=opaque_calls(visits),
        findings=find(Reading(program, visits, flow, found, executable, mesh, warnings), planned, threshold_bytes),
    )


def _entry(one: Collective) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "axes": None if one.axes is None else list(one.axes),
        "group_size": one.group_size,
        "times": one.times,
        "branches": list(one.branches),
        "arrays": [str(array) for array in one.arrays],
        "sent_bytes": float(one.sent_bytes),
        "tensors": list(one.tensors),
        "source": one.source,
        "op_name": one.op_name,
    }


# As text ---------------------------------------------------------------------------------------------------------


def _communication(found: Iterable[Collective]) -> str:
    """A line for each place in the code that communicates, most bytes first."""
    made = places(found)
    rows = [
        [
            place.kind + " in a branch" * place.in_branch,
            place.axes,
            f"{place.times}x",
            human_bytes(place.sent_bytes),
            place.what,
            short_source(place.source),
        ]
        for place in made
    ]
    total = human_bytes(sum(place.sent_bytes for place in made))
    return f"sends {total}\n" + table(["", "axes", "times", "bytes", "what", "where"], rows)


def _per_axis(sent: dict[str, int], traced: dict[str, int] | None) -> str:
    form = traced or {}
    rows = [[axes, f"{sent.get(axes, 0):,}", f"{form.get(axes, 0):,}"] for axes in dict.fromkeys([*sent, *form])]
    return table(["over", "bytes", "as traced"] if traced else ["over", "bytes"], [r[: 2 + bool(form)] for r in rows])


def _memory(held: Memory) -> str:
    small = {name: size for name, size in held.arguments.items() if size < held.total / 1000}
    rows = [item for item in held.arguments.items() if item[0] not in small]
    rows += [("other arguments", sum(small.values())), ("outputs", held.outputs), ("temporaries", held.temporaries)]
    lines = table(None, [[name, human_bytes(size)] for name, size in rows if size])
    return f"holds {human_bytes(held.total)}{' at its peak' if held.peak else ' at most'}\n{lines}"


def _states(held: dict[str, int]) -> str:
    rows = [[name, human_bytes(size)] for name, size in held.items() if size]
    return f"of that, by its closed form, {human_bytes(sum(held.values()))}\n{table(None, rows)}"


def _largest(arrays: list[Held], title: str) -> str:
    rows = [[human_bytes(one.num_bytes), one.array, one.name, short_source(one.source)] for one in arrays]
    return f"{title}\n{table(None, rows)}"


def _findings(found: Sequence[Finding]) -> str:
    lines = []
    for one in found[:NUM_LARGEST]:
        lines += [f"  {one.kind}  {human_bytes(one.num_bytes)}", f"    {one.what}"]
        lines += [f"    where: {short_source(one.where)}", f"    fix: {one.fix}"]
    more = len(found) - NUM_LARGEST
    return "\n".join(["findings", *lines, *([f"  and {more} more"] if more > 0 else [])])
