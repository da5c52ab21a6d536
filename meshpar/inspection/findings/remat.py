"""The partitioner's last resort: an array gathered whole on every device, to be cut another way.

XLA says so on standard error only; see `compiling`. It also says so of attempts that it then drops, so that a warning
counts only where the compiled program gathers an array of that size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from meshpar.inspection.findings.finding import Finding
from meshpar.inspection.program.hlo import Collective
from meshpar.inspection.program.shardings import Spec, spec, spec_text, tiles
from meshpar.inspection.program.text import Array, Instruction, Program
from meshpar.sharding.resolve import AnyMesh

_WARNING = re.compile(
    r"Involuntary full rematerialization\. The compiler cannot go from sharding "
    r"\{(?P<before>.*?)\} to \{(?P<after>.*?)\} efficiently for HLO operation "
    r"%?(?P<name>[\w.\-]+) = (?P<type>\S+) (?P<opcode>[\w\-]+)\((?P<rest>.*?)\. As the last resort"
)


@dataclass(frozen=True)
class Rematerialization:
    """One warning.

    Args:
      operation: what makes the array; it is of no computation of the compiled program.
      before, after: the shardings from and to which it goes, as XLA prints them.
      array: the whole of it.
    """

    operation: Instruction
    before: str
    after: str
    array: Array


def rematerializations(warnings: Iterable[str]) -> list[Rematerialization]:
    """What the lines that XLA wrote say; the same said twice counts once. Lines of another form say nothing."""
    found = (one for line in warnings if (match := _WARNING.search(line)) for one in _read(match))
    return list(dict.fromkeys(found))


def find_rematerializations(
    program: Program, found: Iterable[Collective], warnings: Iterable[str], mesh: AnyMesh | None
) -> Iterator[Finding]:
    """The warnings that came true, as findings."""
    gathers = [one for one in found if one.kind == "all_gather"]
    for one in rematerializations(warnings):
        gather = next((gather for gather in gathers if _completes(gather, one)), None)
        if gather is None:
            continue
        before, after = spec(one.before, mesh), spec(one.after, mesh)
        told = [text if axes is None else spec_text(axes) for axes, text in ((before, one.before), (after, one.after))]
        yield Finding(
            kind="rematerialization",
            what=f"to go from {told[0]} to {told[1]}, every device gathers the whole {one.array}",
            where=program.source(one.operation) or gather.place,
            num_bytes=one.array.num_bytes,
            fix=_fix(before, after),
        )


def _read(match: re.Match[str]) -> Iterator[Rematerialization]:
    operation = Instruction(0, "", match["name"], match["type"], match["opcode"], match["rest"], False)
    held = tiles(match["before"])
    if held is not None and len(operation.arrays) == 1:
        local = operation.arrays[0]  # the line shows what one device has of it
        counts = [int(tile.max()) + 1 for tile in held] or [1] * len(local.shape)
        shape = tuple(size * count for size, count in zip(local.shape, counts, strict=True))
        yield Rematerialization(operation, match["before"], match["after"], Array(local.dtype, shape))


def _completes(gather: Collective, one: Rematerialization) -> bool:
    """Whether a gather makes the whole array, and of tiles that differ; CPUs change the dtype."""
    if one.array.size not in {array.size for array in gather.arrays}:
        return False
    held = np.stack(tiles(one.before) or [np.zeros(0)], axis=1)
    if len(held) != sum(map(len, gather.groups)):
        return True  # a sharding of part of the devices: their numbers are not those of the groups
    return all(len({tuple(held[device]) for device in group}) == len(group) for group in gather.groups)


def _fix(before: Spec | None, after: Spec | None) -> str:
    """Goes by way of the axes that both shardings have: one gather over the others, then an all-to-all."""
    if before is None or after is None:
        return "after it, pin the array to a sharding between the two with jax.lax.with_sharding_constraint"
    kept = {axis for axes in after for axis in axes}
    between = tuple(tuple(axis for axis in axes if axis in kept) for axes in before)
    if between == before or not any(between):
        return f"make the array as {spec_text(after)} where it comes from"
    return f"after it, x = jax.lax.with_sharding_constraint(x, {spec_text(between)})"
