"""What a compiled program communicates, computes and holds: one reading for people and programs alike."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import groupby
from typing import Any

from jax.stages import Compiled

from meshpar.inspection.finding import Finding, Planned
from meshpar.inspection.findings import THRESHOLD_BYTES, Reading, find
from meshpar.inspection.flops import opaque_calls, product_flops
from meshpar.inspection.flow import Flow
from meshpar.inspection.hlo import Collective, collectives_of, total_sent_bytes
from meshpar.inspection.memory import Held, Memory, largest, memory
from meshpar.inspection.program import Program
from meshpar.inspection.walk import walk
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
      closed_form: bytes over each combination of axes, as the presets of a run say; None if they do not.
      findings: what its author hardly meant, the most expensive first.
    """

    axes: dict[str, int]
    collectives: tuple[Collective, ...]
    flops: int
    memory: Memory
    largest: tuple[Held, ...]
    opaque: tuple[str, ...]
    closed_form: dict[str, int] | None = None
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
            "closed_form_per_axis": self.closed_form,
            "collectives": [_entry(one) for one in self.collectives],
            "flops": self.flops,
            "memory": asdict(self.memory) | {"total": self.memory.total},
            "largest": [asdict(held) for held in self.largest],
            "opaque": list(self.opaque),
            "findings": [one.as_json() for one in self.findings],
        }

    def __str__(self) -> str:
        parts = [f"mesh: {describe_sizes(self.axes)}"] if self.axes else []
        parts += [
            _communication(self.collectives),
            _per_axis(self.bytes_per_axis, self.closed_form),
            f"matrix products: {self.flops:,} FLOPs",
            _memory(self.memory),
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
    found = tuple(collectives_of(program, visits, mesh, flow))
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
    place = lambda one: (one.kind, axes_name(one.axes), one.source, " in a branch" * bool(one.branches))
    groups = [(key, list(group)) for key, group in groupby(sorted(found, key=place), place)]
    groups.sort(key=lambda group: total_sent_bytes(group[1]), reverse=True)
    rows = [
        [
            kind + branch,
            axes,
            f"{sum(one.times for one in group)}x",
            human_bytes(float(total_sent_bytes(group))),
            _what(group),
            short_source(source),
        ]
        for (kind, axes, source, branch), group in groups
    ]
    total = human_bytes(float(sum(total_sent_bytes(group) for _, group in groups)))
    return f"sends {total}\n" + _table(["", "axes", "times", "bytes", "what", "where"], rows)


def _per_axis(sent: dict[str, int], closed_form: dict[str, int] | None) -> str:
    form = closed_form or {}
    rows = [[axes, f"{sent.get(axes, 0):,}", f"{form.get(axes, 0):,}"] for axes in dict.fromkeys([*sent, *form])]
    return _table(
        ["over", "bytes", "closed form"] if closed_form else ["over", "bytes"], [r[: 2 + bool(form)] for r in rows]
    )


def _memory(held: Memory) -> str:
    small = {name: size for name, size in held.arguments.items() if size < held.total / 1000}
    rows = [item for item in held.arguments.items() if item[0] not in small]
    rows += [("other arguments", sum(small.values())), ("outputs", held.outputs), ("temporaries", held.temporaries)]
    lines = _table(None, [[name, human_bytes(size)] for name, size in rows if size])
    return f"holds {human_bytes(held.total)}{' at its peak' if held.peak else ' at most'}\n{lines}"


def _largest(arrays: list[Held], title: str) -> str:
    rows = [[human_bytes(one.num_bytes), one.array, one.name, short_source(one.source)] for one in arrays]
    return f"{title}\n{_table(None, rows)}"


def _findings(found: Sequence[Finding]) -> str:
    lines = []
    for one in found[:NUM_LARGEST]:
        lines += [f"  {one.kind}  {human_bytes(one.num_bytes)}", f"    {one.what}"]
        lines += [f"    where: {short_source(one.where)}", f"    fix: {one.fix}"]
    more = len(found) - NUM_LARGEST
    return "\n".join(["findings", *lines, *([f"  and {more} more"] if more > 0 else [])])


def _what(group: list[Collective]) -> str:
    """The tensors of a group of collectives, the one that sends most first; of activations, the shape."""
    group = sorted(group, key=lambda one: one.times * one.sent_bytes, reverse=True)
    tensors = list(dict.fromkeys(tensor for one in group for tensor in one.tensors))
    names = tensors or list(dict.fromkeys(str(array) for one in group for array in one.arrays))
    return ", ".join(names[:1]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def axes_name(axes: tuple[str, ...] | None) -> str:
    """`fsdp, tensor`; axes are unknown where no mesh names them."""
    return "unknown axes" if axes is None else ", ".join(axes) or "none"


def short_source(source: str) -> str:
    """The file as seen from here, or by its last two names."""
    here = os.getcwd() + os.sep
    return source.removeprefix(here) if source.startswith(here) else "/".join(source.split("/")[-2:])


def _table(head: list[str] | None, rows: list[list[str]]) -> str:
    table = [head, *rows] if head else rows
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)) for row in table)
    return "\n".join(line.rstrip() for line in lines)
