"""Lists the activations that a planned program moves between devices, with the lines of the user's code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshpar.errors import Problems, ShardingError
from meshpar.mesh.varying import Axes
from meshpar.partition.layout import Layout, Move
from meshpar.partition.program import Program, Step
from meshpar.tree import human_bytes

CONSTRAINTS = ("sharding_constraint", "reshard")
SUMS = ("all-reduce", "reduce-scatter")


@dataclass(frozen=True)
class MovedValue:
    """An activation that an operation needs in another layout than it has.

    Args:
      line: file, line and function of the user's code.
      operation: the primitive.
      layout: of the value before.
      move: what is done to it.
      times: how often a forward pass does it.
      is_declared: whether a rule or a constraint asks for it: the sum of a sharded product, sequence parallelism, a
        sharding that the model declares. Others follow from operands that disagree.
    """

    line: str
    operation: str
    layout: Layout
    move: Move
    times: int
    is_declared: bool

    @property
    def sent(self) -> int:
        """The bytes that a device sends in a forward pass."""
        return self.times * self.move.sent

    @property
    def dim(self) -> str:
        """The dim that is moved: its name, or its position."""
        if self.move.kind == "all-reduce":
            return ""
        return self.layout.names[self.move.dim] or f"dim {self.move.dim}"

    def as_json(self) -> dict[str, Any]:
        """The value as plain data."""
        return {
            "line": self.line,
            "operation": self.operation,
            "layout": str(self.layout),
            "move": self.move.kind,
            "dim": self.dim,
            "axes": list(self.move.axes),
            "times": self.times,
            "sent_bytes": self.sent,
            "declared": self.is_declared,
        }

    def __str__(self) -> str:
        what = f"{self.move.kind} {self.dim}".strip() + f" over {', '.join(self.move.axes)}"
        times = f" x {self.times}" if self.times > 1 else ""
        note = "" if self.is_declared else "   not declared"
        return f"{self.line}  {self.operation}\n    {what}: {self.layout}  {human_bytes(self.move.sent)}{times}{note}"


def moved_values(program: Program, residual_axes: Axes = ()) -> list[MovedValue]:
    """The activations that a program moves, in its order. Slices, which send nothing, are left out.

    Args:
      residual_axes: the axes over which the sequence of the residual stream is sharded.
    """
    return list(_moved(program, residual_axes, 1))


def check_declared(found: list[MovedValue]) -> None:
    """Raises ShardingError if a value is moved that no rule and no constraint declares."""
    problems = Problems()
    for one in found:
        if not one.is_declared:
            what = f"{one.operation} needs {one.layout} in another layout: {one.move.kind} {one.dim} over "
            what += f"{', '.join(one.move.axes)}, {human_bytes(one.sent)}"
            fix = (
                "declare it with jax.lax.with_sharding_constraint, change the rule of one of the dims, or strict=false"
            )
            problems.add(one.line, what, fix)
    problems.raise_any(ShardingError, "strict: activations are moved that nothing declares:")


def _moved(program: Program, residual_axes: Axes, times: int) -> Iterator[MovedValue]:
    seen = set()
    for step in program.steps:
        for use in step.ins:
            if use in seen:
                continue
            seen.add(use)
            layout = program.layouts[use.register]
            for move in use.moves(layout, program.sizes):
                if move.sent:
                    declared = _is_declared(step, layout, move, residual_axes)
                    yield MovedValue(step.source.line, step.source.name, layout, move, times, declared)
        for inner, repeats in step.inner:
            yield from _moved(inner, residual_axes, times * repeats)


def _is_declared(step: Step, layout: Layout, move: Move, residual_axes: Axes) -> bool:
    if move.kind in SUMS or step.source.name in CONSTRAINTS:
        return True
    return layout.names[move.dim] == "seq" and {*move.axes} <= {*residual_axes}
