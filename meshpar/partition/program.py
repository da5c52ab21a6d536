"""A planned program: steps on registers, each of which holds a local shard; and the function that runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.mesh.varying import Axes, varies_over, varying
from meshpar.partition.layout import Layout, Move, Sizes, moves
from meshpar.partition.moved import moved
from meshpar.partition.source import Source

Register = int


@dataclass(frozen=True)
class Use:
    """How a step or a program uses a value.

    Args:
      register: where the value is.
      axes: the axes that shard each of its dims for this use; None to take the value as it is.
      varies: the axes over which JAX types it as varying.
      partial: the axes over which it is used as a sum of what the devices hold. A value without a pending sum over
        such an axis counts on the first device.
    """

    register: Register
    axes: tuple[Axes, ...] | None = None
    varies: frozenset[str] = frozenset()
    partial: Axes = ()

    def moves(self, layout: Layout, sizes: Sizes) -> tuple[Move, ...]:
        """What this use moves of a value with this layout."""
        if self.axes is None:
            return ()
        return moves(self.ended(layout), self.axes, self.varies, sizes)

    def ended(self, layout: Layout) -> Layout:
        """The layout whose pending sums are those that end for this use."""
        return replace(layout, pending=tuple(axis for axis in layout.pending if axis not in self.partial))

    def of(self, x: Any, layout: Layout, sizes: Sizes) -> Any:
        """The local shard as this use needs it."""
        if self.axes is None:
            return x
        x = moved(x, self.ended(layout), self.axes, self.varies, sizes)
        if alone := tuple(axis for axis in self.partial if axis not in layout.pending):
            x = jnp.where(lax.axis_index(alone) == 0, varying(x, alone), jnp.zeros_like(x))
        return x


@dataclass(frozen=True)
class Step:
    """One operation on local shards.

    Args:
      compute: (*local shards) -> local results.
      source: the operation of the user's program, and its line.
      inner: programs that it contains, such as the body of a loop, with how often each runs.
      equation: see `Signature`.
      then: as there, without its first argument.
    """

    compute: Callable[..., Sequence[Any]]
    ins: tuple[Use, ...]
    outs: tuple[Register, ...]
    source: Source
    inner: tuple[tuple[Program, int], ...] = ()
    equation: tuple[str, str, str] | None = None
    then: Callable[..., Sequence[Any]] | None = None


@dataclass
class Program:
    """A plan of a traced program on a mesh.

    Args:
      sizes: mesh axis -> its size.
      layouts: the layout of each register.
      inputs: the registers of its arguments.
      constants: register -> an array that every device holds.
      outputs: how its results are used.
    """

    sizes: Sizes
    layouts: list[Layout] = field(default_factory=list)
    inputs: list[Register] = field(default_factory=list)
    constants: dict[Register, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    outputs: list[Use] = field(default_factory=list)

    def run(self, *shards: Any) -> list[Any]:
        """Computes the program on local shards, inside `shard_map`: those of `inputs` -> those of `outputs`."""
        held = self._held(shards)
        self._compute(self.steps, held)
        return [held.used(use) for use in self.outputs]

    def run_in(self, segments: Sequence[tuple[Sequence[Step], bool]], *shards: Any) -> list[Any]:
        """The same in segments: (steps, whether the backward computes them again instead of holding their results)."""
        held = self._held(shards)
        for steps, again in segments:
            if again:
                self._compute_again(steps, held)
            else:
                self._compute(steps, held)
        return [held.used(use) for use in self.outputs]

    def _held(self, shards: Sequence[Any]) -> _Held:
        return _Held(dict(self.constants) | dict(zip(self.inputs, shards, strict=True)), self.layouts, self.sizes)

    def _compute(self, steps: Sequence[Step], held: _Held) -> None:
        for step in steps:
            with step.source.naming():
                results = step.compute(*map(held.used, step.ins))
            for register, x in zip(step.outs, results, strict=True):
                held.values[register] = self._typed(register, x)

    def _compute_again(self, steps: Sequence[Step], held: _Held) -> None:
        own = {out for step in steps for out in step.outs}
        read = list(dict.fromkeys(use for step in steps for use in step.ins if use.register not in own))

        def segment(*arrays: Any) -> list[Any]:
            inside = _Held({}, self.layouts, self.sizes, dict(zip(read, arrays, strict=True)))
            self._compute(steps, inside)
            return [inside.values[register] for register in sorted(own)]

        results = jax.checkpoint(segment)(*map(held.used, read))
        held.values |= dict(zip(sorted(own), results, strict=True))

    def _typed(self, register: Register, x: Any) -> Any:
        layout = self.layouts[register]
        if layout.stored:
            return x
        if unplanned := varies_over(x) - layout.varies:
            raise AssertionError(f"a result differs over {', '.join(sorted(unplanned))}, as {layout} must not")
        return varying(x, tuple(sorted(layout.varies)))


@dataclass
class _Held:
    """The values of registers while a program runs, and the forms in which they are used."""

    values: dict[Register, Any]
    layouts: list[Layout]
    sizes: Sizes
    views: dict[Use, Any] = field(default_factory=dict)

    def used(self, use: Use) -> Any:
        # Each form of a value is made once: gradients of its uses are added before they are summed over devices.
        if use not in self.views:
            self.views[use] = use.of(self.values[use.register], self.layouts[use.register], self.sizes)
        return self.views[use]
