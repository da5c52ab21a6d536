"""Which results of a program its backward computes again, so that they are not held for it.

A product needs its operands in the backward, and an elementwise operation needs operands or its result. If all of them
were saved, the backward would hold several arrays for each product. So elementwise operations, and the products that
read them, are joined in *segments*. A segment saves only what it reads. Its backward computes the elementwise
operations again; the result of a product is not needed, so no product is computed twice. Communication is never inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from meshpar.parallel.context import ParallelContext
from meshpar.parallel.data import CHEAP, gathering_again
from meshpar.partition.layout import Layout, Sizes
from meshpar.partition.program import Program, Register, Step, Use
from meshpar.partition.streamed import streamed

VIEWS = {"slice", "concatenate", "split", "pad", "rev", "sin", "cos", "expand_dims", "reduce_max", "stop_gradient"}
PRODUCT = "dot_general"


Segment = tuple[list[Step], bool]
"""Steps in an order in which each comes after those that it reads; whether the backward computes them again."""


def differentiable(program: Program, ctx: ParallelContext) -> Callable[..., list[Any]]:
    """The function of a program that is differentiated: its backward holds little more than results of products.

    Under ZeRO-3 the backward gathers the parameters again. If the program's loops gather layers again, it holds its
    other parameters, which are those of the model's ends.
    """
    program = streamed(program, ctx)
    loops = (inner for step in program.steps for inner, _ in step.inner)
    if ctx.rules.zero_stage == 3 and _gathers(program) and not any(map(_gathers, loops)):
        return jax.checkpoint(program.run, policy=gathering_again(jax.checkpoint_policies.everything_saveable))
    return partial(program.run_in, segments(program))


def _gathers(program: Program) -> bool:
    return any(layout.stored for layout in program.layouts)


def segments(program: Program) -> list[Segment]:
    """Divides a program. A step outside of a segment runs alone."""
    return _Division(program.steps, program.outputs, program.layouts, program.sizes).run()


class _Division:
    def __init__(self, steps: Sequence[Step], outputs: Sequence[Use], layouts: Sequence[Layout], sizes: Sizes) -> None:
        self.left = list(steps)
        self.layouts = layouts
        self.sizes = sizes
        self.done: set[Register] = {*range(len(layouts))} - {out for step in steps for out in step.outs}
        self.sent: set[Use] = set()
        self.readers: dict[Use, int] = {}
        for use in (*(use for step in steps for use in step.ins), *outputs):
            self.readers[use] = self.readers.get(use, 0) + 1

    def run(self) -> list[Segment]:
        found = []
        while self.left:
            segment = self._segment()
            if segment is None:
                segment = [self._first()], False
            steps, _ = segment
            taken = {id(step) for step in steps}
            self.left = [step for step in self.left if id(step) not in taken]
            self.done |= {out for step in steps for out in step.outs}
            self.sent |= {use for step in steps for use in step.ins}
            found.append(segment)
        return found

    def _first(self) -> Step:
        return next(step for step in self.left if all(use.register in self.done for use in step.ins))

    def _segment(self) -> Segment | None:
        """All elementwise steps that can run now, and the products that read them; None if there is no such product."""
        alone: set[Use] = set()
        while True:
            steps, own = self._grown(alone)
            inside = [use for step in steps for use in step.ins if use.register in own]
            split = {use for use in inside if self._sums_gradients(use) and inside.count(use) < self.readers[use]}
            if split <= alone:
                break
            alone |= split
        if not any(step.source.name == PRODUCT for step in steps) or len(steps) < 2:
            return None
        return steps, True

    def _grown(self, alone: set[Use]) -> tuple[list[Step], set[Register]]:
        own: set[Register] = set()
        cheap = [step for step in self.left if self._is_cheap(step) and self._joins(step, own, alone)]
        products = [
            step for step in self.left
            if step.source.name == PRODUCT and self._can_run(step, own, alone)
            and any(use.register in own for use in step.ins)
        ]  # fmt: skip
        return [*cheap, *products], own

    def _joins(self, step: Step, own: set[Register], alone: set[Use]) -> bool:
        if not self._can_run(step, own, alone):
            return False
        own |= {*step.outs}
        return True

    def _can_run(self, step: Step, own: set[Register], alone: set[Use]) -> bool:
        return all(
            (use.register in own and use not in alone and not self._communicates(use))
            or (use.register in self.done and (use in self.sent or not self._communicates(use)))
            for use in step.ins
        )

    def _is_cheap(self, step: Step) -> bool:
        return not step.inner and step.source.name in CHEAP | VIEWS

    def _communicates(self, use: Use) -> bool:
        return any(move.sent for move in use.moves(self.layouts[use.register], self.sizes)) or bool(use.partial)

    def _sums_gradients(self, use: Use) -> bool:
        """Whether the backward of this use sums gradients over devices: then it is made once for all that read it."""
        return use.axes is not None and not use.varies <= self.layouts[use.register].varies
