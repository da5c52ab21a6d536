"""Finds arrays that every device gathers whole because XLA's partitioner found no better way to another sharding.

XLA reports them only on standard error, see `compiling`. It also reports attempts that it drops later, so a warning
counts only if the compiled program gathers an array of that size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from meshpar.inspection.findings.finding import Finding
from meshpar.inspection.program.hlo import Collective
from meshpar.inspection.program.shardings import Spec, spec, spec_text, tiles
from meshpar.inspection.program.text import ArrayType, Instruction, Program
from meshpar.sharding.resolve import AnyMesh

_WARNING = re.compile(
    r"Involuntary full rematerialization\. The compiler cannot go from sharding "
    r"\{(?P<before>.*?)\} to \{(?P<after>.*?)\} efficiently for HLO operation "
    r"%?(?P<name>[\w.\-]+) = (?P<type>\S+) (?P<opcode>[\w\-]+)\((?P<rest>.*?)\. As the last resort"
)


@dataclass(frozen=True)
class Rematerialization:
    """A warning of XLA.

    Args:
      operation: the instruction that computes the array; it belongs to no computation of the compiled program.
      before: the sharding of the array, as XLA prints it.
      after: the sharding that it is converted to.
      array: the type of the whole array.
    """

    operation: Instruction
    before: str
    after: str
    array: ArrayType


def rematerializations(warnings: Iterable[str]) -> list[Rematerialization]:
    """Parses the lines that XLA wrote, without duplicates and lines of another form."""
    found = (one for line in warnings if (match := _WARNING.search(line)) for one in _read(match))
    return list(dict.fromkeys(found))


def find_rematerializations(
    program: Program, found: Iterable[Collective], warnings: Iterable[str], mesh: AnyMesh | None
) -> Iterator[Finding]:
    """The warnings that apply to the compiled program, as findings."""
    gathers = [one for one in found if one.kind == "all_gather"]
    for one in rematerializations(warnings):
        gather = next((gather for gather in gathers if _completes(gather, one)), None)
        if gather is None:
            continue
        before = spec(one.before, mesh)
        after = spec(one.after, mesh)
        before_text = one.before if before is None else spec_text(before)
        after_text = one.after if after is None else spec_text(after)
        yield Finding(
            kind="rematerialization",
            what=f"to go from {before_text} to {after_text}, every device gathers the whole {one.array}",
            where=program.source(one.operation) or gather.place,
            num_bytes=one.array.num_bytes,
            fix=_fix(before, after),
        )


def _read(match: re.Match[str]) -> Iterator[Rematerialization]:
    operation = Instruction(0, "", match["name"], match["type"], match["opcode"], match["rest"], False)
    held = tiles(match["before"])
    if held is not None and len(operation.arrays) == 1:
        local = operation.arrays[0]  # the line shows the part of one device
        counts = [int(tile.max()) + 1 for tile in held] or [1] * len(local.shape)
        shape = tuple(size * count for size, count in zip(local.shape, counts, strict=True))
        yield Rematerialization(operation, match["before"], match["after"], ArrayType(local.dtype, shape))


def _completes(gather: Collective, one: Rematerialization) -> bool:
    """Whether a gather joins different tiles to the whole array. XLA:CPU may change the dtype."""
    if one.array.size not in {array.size for array in gather.arrays}:
        return False
    held = np.stack(tiles(one.before) or [np.zeros(0)], axis=1)
    if len(held) != sum(map(len, gather.groups)):
        return True  # it shards over a part of the devices, whose numbers are not those of the groups
    return all(len({tuple(held[device]) for device in group}) == len(group) for group in gather.groups)


def _fix(before: Spec | None, after: Spec | None) -> str:
    """Proposes an intermediate sharding over the common axes: a gather over the other axes, then an all-to-all."""
    if before is None or after is None:
        return "after this line, constrain the array to a sharding in between with jax.lax.with_sharding_constraint"
    common = {axis for axes in after for axis in axes}
    between = tuple(tuple(axis for axis in axes if axis in common) for axes in before)
    if between == before or not any(between):
        return f"create the array with the sharding {spec_text(after)}"
    return f"after this line, insert x = jax.lax.with_sharding_constraint(x, {spec_text(between)})"
