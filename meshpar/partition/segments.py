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
from meshpar.partition.joint import joint
from meshpar.partition.layout import Layout, Sizes
from meshpar.partition.program import Program, Register, Step, Use
from meshpar.partition.streamed import streamed

VIEWS = {"slice", "concatenate", "split", "pad", "rev", "sin", "cos", "expand_dims", "reduce_max", "stop_gradient"}
WITH_OWN_DERIVATIVE = {"custom_jvp_call", "custom_vjp_call"}
PRODUCT = "dot_general"


Segment = tuple[list[Step], bool]
"""Steps in an order in which each comes after those that it reads; whether the backward computes them again."""


def differentiable(program: Program, ctx: ParallelContext) -> Callable[..., list[Any]]:
    """The function of a program that is differentiated: its backward holds little more than results of products.

    Under ZeRO-3 the backward gathers the parameters again. If the program's loops gather layers again, it holds its
    other parameters, which are those of the model's ends.
    """
    program = joint(streamed(program, ctx))
    loops = (inner for step in program.steps for inner, _ in step.inner)
    run = partial(program.run_in, segments(program))
    if ctx.rules.zero_stage == 3 and _gathers(program) and not any(map(_gathers, loops)):
        return jax.checkpoint(run, policy=gathering_again(jax.checkpoint_policies.everything_saveable))
    return run


def _gathers(program: Program) -> bool:
    return any(layout.stored for layout in program.layouts)


def segments(program: Program) -> list[Segment]:
    """Divides a program. A step outside of a segment runs alone."""
    return _Division(program.steps, program.outputs, program.layouts, program.sizes).run()


def _is_cheap(step: Step) -> bool:
    """Whether a step is elementwise; or a function of such steps, which has a derivative of its own."""
    if step.source.name not in WITH_OWN_DERIVATIVE:
        return not step.inner and step.source.name in CHEAP | VIEWS
    return all(
        _is_cheap(one) and not any(_communicates(use, inner.layouts, inner.sizes) for use in one.ins)
        for inner, _ in step.inner
        for one in inner.steps
    )


def _communicates(use: Use, layouts: Sequence[Layout], sizes: Sizes) -> bool:
    return any(move.sent for move in use.moves(layouts[use.register], sizes)) or bool(use.partial)


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
        """The next step that runs alone. What is gathered for it is there for the segments that wait for it."""
        ready = [step for step in self.left if all(use.register in self.done for use in step.ins)]
        return next((step for step in ready if self._gathers(step)), ready[0])

    def _gathers(self, step: Step) -> bool:
        """Whether a step reads a parameter that is stored in shards, and was not gathered yet."""
        return any(self.layouts[use.register].stored and use not in self.sent for use in step.ins)

    def _segment(self) -> Segment | None:
        """The products whose operands elementwise steps can make now, and these steps; None if there are none.

        Other steps wait for a segment that needs them: what this one made would be held for it.
        """
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
        cheap = [step for step in self.left if _is_cheap(step) and self._joins(step, own, alone)]
        products = [
            step for step in self.left
            if step.source.name == PRODUCT and self._can_run(step, own, alone)
            and any(use.register in own for use in step.ins)
        ]  # fmt: skip
        needed = {use.register for step in products for use in step.ins}
        for step in reversed(cheap):
            if not needed.isdisjoint(step.outs):
                needed |= {use.register for use in step.ins}
        cheap = [step for step in cheap if not needed.isdisjoint(step.outs)]
        return [*cheap, *products], own & {out for step in cheap for out in step.outs}

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

    def _communicates(self, use: Use) -> bool:
        return _communicates(use, self.layouts, self.sizes)

    def _sums_gradients(self, use: Use) -> bool:
        """Whether the backward of this use sums gradients over devices: then it is made once for all that read it."""
        return use.axes is not None and not use.varies <= self.layouts[use.register].varies
