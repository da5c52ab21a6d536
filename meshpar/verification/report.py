"""Reports the result of `verify`: a table of layouts, and the wrong layouts, each with its first difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshpar.mesh.layout import describe_sizes
from meshpar.verification.compare import TOLERANCE, Comparison, Difference
from meshpar.verification.trial import KINDS

CHECKPOINT = ("checkpoint",)
"""The value of `Row.axes` for a run that was interrupted and restored."""
Sizes = dict[str, int]


@dataclass(frozen=True)
class Row:
    """The comparison of one layout with one device.

    Args:
      name: name of the layout.
      axes: its axes with more than one device.
      compared: the comparison; None if the layout could not be traced or run, for the reason `error`.
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
class Verification:
    """The result of `verify`; `str` prints it as a table.

    Args:
      sizes: axis -> size of the mesh that was verified.
      shrunk: key -> (value in the run, value in the small run) of each key that was shrunk.
      rows: the whole mesh, each axis alone, and one device. If the whole mesh is equal, also resumed runs; if it
        differs and no single axis does, also pairs of axes.
      undecided: parameters with elements that are not compared, because their gradient is zero.
      draws: whether the training draws random numbers, for dropout for example.
      draws_differ: whether the layouts differ only if random numbers are drawn.
    """

    sizes: Sizes
    shrunk: dict[str, tuple[Any, Any]]
    rows: tuple[Row, ...]
    undecided: tuple[str, ...]
    draws: bool
    draws_differ: bool = False

    @property
    def is_equal(self) -> bool:
        """Whether every layout computes the same as one device."""
        return all(row.is_equal for row in self.rows)

    @property
    def culprits(self) -> tuple[Row, ...]:
        """The wrong layouts with the fewest axes; checkpoints come last."""
        wrong = sorted((row for row in self.rows if not row.is_equal), key=_num_axes)
        return tuple(row for row in wrong if _num_axes(row) == _num_axes(wrong[0]))

    def as_json(self) -> dict[str, Any]:
        """The result as plain data."""
        return {
            "equal": self.is_equal,
            "mesh": self.sizes,
            "tolerance": TOLERANCE,
            "shrunk": {key: list(values) for key, values in self.shrunk.items()},
            "rows": [asdict(row) | {"equal": row.is_equal} for row in self.rows],
            "culprits": [row.name for row in self.culprits],
            "undecided": list(self.undecided),
            "draws": self.draws,
            "draws_differ": self.draws_differ,
        }

    def __str__(self) -> str:
        parts = [f"{describe_sizes(self.sizes)}, in float64, compared with one device"]
        if self.shrunk:
            changes = ", ".join(f"{key} {before} -> {after}" for key, (before, after) in self.shrunk.items())
            parts.append(f"made small: {changes}")
        parts.append(_table(self.rows))
        if self.undecided:
            paths = ", ".join(self.undecided)
            parts.append(f"not compared, because the gradient is zero except for rounding: parameters of {paths}")
        return "\n\n".join([*parts, self._report()])

    def _report(self) -> str:
        if self.is_equal:
            draws = ", including random draws" if self.draws else ""
            return f"equal to one device{draws}: no difference is above {TOLERANCE:g}"
        lines = ["NOT equal to one device"]
        for row in self.culprits:
            layout = {0: "on one device already", 1: row.name}.get(len(row.axes), f"{row.name}, together")
            lines += [f"  culprit: {layout}", f"    {row.difference or row.error}"]
        if self.draws_differ:
            lines.append("  it is equal without dropout: only the random numbers differ")
        return "\n".join(lines)


def _num_axes(row: Row) -> float:
    return math.inf if row.axes == CHECKPOINT else len(row.axes)


def _table(rows: Sequence[Row]) -> str:
    width = max(len(row.name) for row in rows)
    kinds = next((tuple(row.compared.largest) for row in rows if row.compared), KINDS)
    head = "  " + " " * width + "".join(f"  {kind:<10}" for kind in kinds)
    lines = ["largest difference, relative to the largest number of its kind", head.rstrip()]
    for row in rows:
        cells = "".join(f"  {row.compared.largest[k]:<10.1e}" for k in kinds) if row.compared else "  fails"
        mark = "  differs" if row.difference else ""
        lines.append(f"  {row.name:<{width}}{cells}".rstrip() + mark)
    return "\n".join(lines)
