"""What a plan knows of a value: a register that holds it, or how it is computed where it is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from meshpar.mesh.varying import Axes
from meshpar.partition.layout import Layout

MANY = 2


@dataclass(eq=False)
class Placed:
    """A value that a register holds.

    Args:
      uses: how many operations read it; only the sum of a value that one operation reads may stay pending in it.
    """

    register: int
    layout: Layout
    uses: int = MANY
    whole: Placed | None = None


@dataclass(eq=False)
class Deferred:
    """A value that is computed where it is used, in the layout of that use.

    Args:
      layout: its shape, and the axes that what it is made of would like.
      make: axes -> the value, sharded over them.
    """

    layout: Layout
    make: Callable[[tuple[Axes, ...]], Placed]
    uses: int = MANY
    made: dict[tuple[Axes, ...], Placed] = field(default_factory=dict)
