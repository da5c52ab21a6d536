"""How a value of a traced program is laid out over the mesh, and the moves that change one layout to another.

This file is plain Python about layouts: it touches no array, so a program is planned, printed and counted without one.
`moved` performs the moves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np

from meshpar.mesh.varying import Axes
from meshpar.parallel.data import Stored

Sizes = Mapping[str, int]
"""Mesh axis -> its size."""


@dataclass(frozen=True)
class Layout:
    """A value of a traced program and how the devices hold it.

    Args:
      shape, dtype: of the whole value.
      axes: the mesh axes that shard each dim, slowest first; `()` for a dim that is whole.
      names: the name of each dim, `""` where it is unknown.
      pending: the value is the sum, over these axes, of what the devices hold.
      varies: the axes over which JAX types the value as varying: those that shard it and those that are pending, and
        those over which it is a copy whose gradient is summed later.
      is_pinned: whether a rule of the user shards it, as that of a parameter. Other operands move to it.
      is_weight: whether it follows from parameters alone, so that a product with it is one that layers multiply by.
      stored: the dims that are stored in shards and gathered before use, which `axes` leaves out.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[Axes, ...]
    names: tuple[str, ...]
    pending: Axes = ()
    varies: frozenset[str] = frozenset()
    is_pinned: bool = False
    is_weight: bool = False
    stored: Stored = ()

    def __post_init__(self) -> None:
        used = [axis for axes in self.axes for axis in axes] + [*self.pending]
        if len(used) != len({*used}):
            raise AssertionError(f"an axis is used twice in {self}")

    @classmethod
    def whole(cls, shape: tuple[int, ...], dtype: Any) -> Self:
        """The layout of a value that every device holds whole."""
        return cls(tuple(shape), dtype, ((),) * len(shape), ("",) * len(shape))

    @property
    def used(self) -> frozenset[str]:
        """The axes that shard a dim."""
        return frozenset(axis for axes in self.axes for axis in axes)

    def local_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape that each device holds."""
        return tuple(size // count(axes, sizes) for size, axes in zip(self.shape, self.axes, strict=True))

    def local_bytes(self, sizes: Sizes) -> int:
        """The bytes that each device holds; 0 for random keys, which are never sharded."""
        itemsize = self.dtype.itemsize if isinstance(self.dtype, np.dtype) else 0
        return math.prod(self.local_shape(sizes)) * itemsize

    def __str__(self) -> str:
        dims = [
            f"{size}/{'.'.join(axes)}" if axes else str(size) for size, axes in zip(self.shape, self.axes, strict=True)
        ]
        pending = f" + {'.'.join(self.pending)}" if self.pending else ""
        return f"{self.dtype}[{', '.join(dims)}]{pending}"


def count(axes: Axes, sizes: Sizes) -> int:
    """The number of devices along these axes."""
    return math.prod(sizes[axis] for axis in axes)


Kind = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "slice"]


@dataclass(frozen=True)
class Move:
    """One step from a layout to another.

    Args:
      axes: the mesh axes over which it runs.
      dim: the dim that is gathered, scattered or sliced; for an all-to-all the dim that is gathered.
      to_dim: the dim that an all-to-all scatters.
      varies: whether the result of an all-gather is typed as varying, so that its transpose is a reduce-scatter. Else
        its transpose is a slice, which is right where every device uses the result in the same way.
      sent: the bytes that a device sends.
    """

    kind: Kind
    axes: Axes
    dim: int = 0
    to_dim: int = 0
    varies: bool = False
    sent: int = 0


def moves(layout: Layout, axes: tuple[Axes, ...], varies: frozenset[str], sizes: Sizes) -> tuple[Move, ...]:
    """The moves from `layout` to a value without pending sums, sharded over `axes`.

    Sums end first: by a reduce-scatter where a dim is to be sharded over the axis, else by an all-reduce of what is
    left. An axis that passes from one dim to another is an all-to-all. Then dims are gathered, then sliced, which
    costs nothing.

    Args:
      varies: the axes over which the result is typed as varying.
    """
    planned = _Moving(layout, sizes, varies)
    planned.end_sums(axes)
    planned.exchange(axes)
    planned.gather(axes)
    planned.slice(axes)
    return tuple(planned.found)


class _Moving:
    """The layout on its way, and the moves so far."""

    def __init__(self, layout: Layout, sizes: Sizes, varies: frozenset[str]) -> None:
        self.layout = layout
        self.sizes = sizes
        self.varies = varies
        self.found: list[Move] = []

    def add(self, kind: Kind, axes: Axes, dim: int = 0, to_dim: int = 0, **dims: Axes) -> None:
        before = self.layout.local_bytes(self.sizes)
        after = list(self.layout.axes)
        for place, over in ((dim, dims.get("over")), (to_dim, dims.get("to_over"))):
            if over is not None:
                after[place] = over
        pending = tuple(axis for axis in self.layout.pending if axis not in axes)
        self.layout = replace(self.layout, axes=tuple(after), pending=pending)
        varies = kind == "all-gather" and {*axes} <= self.varies
        sent = _sent(kind, before, count(axes, self.sizes))
        self.found.append(Move(kind, axes, dim, to_dim, varies, sent))

    def end_sums(self, target: tuple[Axes, ...]) -> None:
        for dim, over in enumerate(target):
            start = self.layout.axes[dim]
            rest = over[len(start) :] if over[: len(start)] == start else ()
            scattered = _leading(rest, self.layout.pending)
            if scattered:
                self.add("reduce-scatter", scattered, dim, over=start + scattered)
        if self.layout.pending:
            self.add("all-reduce", self.layout.pending)

    def exchange(self, target: tuple[Axes, ...]) -> None:
        for dim, to_dim in ((i, j) for i in range(len(target)) for j in range(len(target)) if i != j):
            kept, released = _split(self.layout.axes[dim], target[dim])
            start, wanted = _split(target[to_dim], self.layout.axes[to_dim])
            if released and released == wanted and start == self.layout.axes[to_dim]:
                self.add("all-to-all", released, dim, to_dim, over=kept, to_over=start + released)

    def gather(self, target: tuple[Axes, ...]) -> None:
        for dim, over in enumerate(target):
            kept, released = _split(self.layout.axes[dim], over)
            if released:
                self.add("all-gather", released, dim, over=kept)

    def slice(self, target: tuple[Axes, ...]) -> None:
        for dim, over in enumerate(target):
            start = self.layout.axes[dim]
            if over != start:
                self.add("slice", over[len(start) :], dim, over=over)


def _leading(axes: Axes, among: Axes) -> Axes:
    """The first of `axes`, as many as are all `among` others."""
    for end, axis in enumerate(axes):
        if axis not in among:
            return axes[:end]
    return axes


def _split(axes: Axes, other: Axes) -> tuple[Axes, Axes]:
    """The common start of two tuples, and the rest of the first."""
    end = next((i for i, (a, b) in enumerate(zip(axes, other, strict=False)) if a != b), min(len(axes), len(other)))
    return axes[:end], axes[end:]


def _sent(kind: Kind, local_bytes: int, n: int) -> int:
    """The bytes that a device sends, from those that it holds before the move."""
    if kind == "slice":
        return 0
    if kind == "all-gather":
        return (n - 1) * local_bytes
    factor = 2 if kind == "all-reduce" else 1
    return factor * (n - 1) * local_bytes // n
