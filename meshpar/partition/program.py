"""A planned program: steps on registers, each of which holds a local shard; and the function that runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.mesh.varying import Axes, varies_over, varying
from meshpar.parallel.context import ParallelContext
from meshpar.parallel.data import gathering_again
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
    """

    compute: Callable[..., Sequence[Any]]
    ins: tuple[Use, ...]
    outs: tuple[Register, ...]
    source: Source
    inner: tuple[tuple[Program, int], ...] = ()


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
        held = dict(self.constants) | dict(zip(self.inputs, shards, strict=True))
        views: dict[Use, Any] = {}

        def used(use: Use) -> Any:
            # Each form of a value is made once: gradients of its uses are added before they are summed over devices.
            if use not in views:
                views[use] = use.of(held[use.register], self.layouts[use.register], self.sizes)
            return views[use]

        for step in self.steps:
            with step.source.naming():
                results = step.compute(*map(used, step.ins))
            for register, x in zip(step.outs, results, strict=True):
                held[register] = self._typed(register, x)
        return [used(use) for use in self.outputs]

    def _typed(self, register: Register, x: Any) -> Any:
        layout = self.layouts[register]
        if layout.stored:
            return x
        if unplanned := varies_over(x) - layout.varies:
            raise AssertionError(f"a result differs over {', '.join(sorted(unplanned))}, as {layout} must not")
        return varying(x, tuple(sorted(layout.varies)))


def gathering_again_in(program: Program, ctx: ParallelContext) -> Callable[..., list[Any]]:
    """A program that, under ZeRO-3, gathers its parameters again in the backward instead of holding them for it.

    If its loops gather layers again, it holds its other parameters, which are those of the model's ends.
    """
    loops = (inner for step in program.steps for inner, _ in step.inner)
    if ctx.rules.zero_stage != 3 or not _gathers(program) or any(map(_gathers, loops)):
        return program.run
    return jax.checkpoint(program.run, policy=gathering_again(jax.checkpoint_policies.everything_saveable))


def _gathers(program: Program) -> bool:
    return any(layout.stored for layout in program.layouts)
