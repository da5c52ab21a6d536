"""The verdict of a proof: a table of layouts, and the first that is guilty, with what differs in it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshpar.mesh.layout import describe_sizes
from meshpar.proof.compare import TOLERANCE, Comparison, Difference
from meshpar.proof.trial import KINDS

CHECKPOINT = ("checkpoint",)
"""In place of axes: what is wrong only after a restore."""
Sizes = dict[str, int]


@dataclass(frozen=True)
class Row:
    """One layout against one device.

    Args:
      name: of the layout.
      axes: those of more than one device.
      compared: None if it could not be traced or run; `error` says why.
    """

    name: str
    axes: tuple[str, ...]
    compared: Comparison | None
    error: str = ""

    @property
    def is_equal(self) -> bool:
        return self.compared is not None and self.compared.first is None

    @property
    def difference(self) -> Difference | None:
        return self.compared.first if self.compared else None


@dataclass(frozen=True)
class Proof:
    """The verdict.

    Args:
      sizes: of the mesh on which it was proved.
      shrunk: key -> (value in the run, value here), of what was made smaller.
      rows: whole mesh, each axis alone, one device; if the first is equal, resumed runs; pairs of axes, where only
        these differ.
      undecided: parameters of which some elements are not compared, as their gradient is zero.
      draws: whether the training draws random numbers, as for dropout.
      draws_guilty: whether it is right as soon as nothing is drawn.
    """

    sizes: Sizes
    shrunk: dict[str, tuple[Any, Any]]
    rows: tuple[Row, ...]
    undecided: tuple[str, ...]
    draws: bool
    draws_guilty: bool = False

    @property
    def is_equal(self) -> bool:
        """Whether every layout computes what one device does."""
        return all(row.is_equal for row in self.rows)

    @property
    def guilty(self) -> tuple[Row, ...]:
        """The fewest axes that are wrong: one device before one axis, one before two, and all before checkpoints."""
        wrong = sorted((row for row in self.rows if not row.is_equal), key=_num_axes)
        return tuple(row for row in wrong if _num_axes(row) == _num_axes(wrong[0]))

    def as_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "equal": self.is_equal,
            "mesh": self.sizes,
            "tolerance": TOLERANCE,
            "shrunk": {key: list(values) for key, values in self.shrunk.items()},
            "rows": [asdict(row) | {"equal": row.is_equal} for row in self.rows],
            "guilty": [row.name for row in self.guilty],
            "undecided": list(self.undecided),
            "draws": self.draws,
            "draws_guilty": self.draws_guilty,
        }

    def __str__(self) -> str:
        parts = [f"{describe_sizes(self.sizes)}, in float64, against one device"]
        parts += [_shrunk(self.shrunk)] if self.shrunk else []
        parts += [_table(self.rows), *self._notes(), self._verdict()]
        return "\n\n".join(parts)

    def _notes(self) -> Iterator[str]:
        if self.undecided:
            which = ", ".join(self.undecided)
            yield f"not compared, where the gradient is zero but for rounding: parameters of {which}"

    def _verdict(self) -> str:
        if self.is_equal:
            masks = ", random draws included" * self.draws
            return f"equal to one device{masks}: no difference is above {TOLERANCE:g}"
        drawn = "\n  it is equal once nothing is drawn: the random draws differ" * self.draws_guilty
        return "NOT equal to one device\n" + "\n".join(map(_blame, self.guilty)) + drawn


def _num_axes(row: Row) -> float:
    return math.inf if row.axes == CHECKPOINT else len(row.axes)


def _shrunk(changes: dict[str, tuple[Any, Any]]) -> str:
    return "made small: " + ", ".join(f"{key} {before} -> {after}" for key, (before, after) in changes.items())


def _table(rows: Sequence[Row]) -> str:
    width = max(len(row.name) for row in rows)
    kinds = next((tuple(row.compared.largest) for row in rows if row.compared), KINDS)
    head = "  " + " " * width + "".join(f"  {kind:<10}" for kind in kinds)
    lines = ["largest difference, as a part of the largest number of its kind", head.rstrip()]
    for row in rows:
        cells = "".join(f"  {row.compared.largest[k]:<10.1e}" for k in kinds) if row.compared else "  fails"
        lines.append(f"  {row.name:<{width}}{cells}".rstrip() + "  differs" * (row.difference is not None))
    return "\n".join(lines)


def _blame(row: Row) -> str:
    who = {0: "on one device already", 1: row.name}.get(len(row.axes), f"{row.name}, together")
    return f"  guilty: {who}\n    {row.difference or row.error}"
