"""Products that gather their input, or scatter their result, in chunks while they multiply: `parallel.tensor.overlap`.

With sequence parallelism a product reads an activation that is gathered over the axes of the sequence, or its result is
a sum that ends as a reduce-scatter over them. A planned program shows both, so they are replaced here:

- All products that read one gathered value are computed while its chunks travel, so it is sent once.
- A product whose sum is only used scattered sends the sums of chunks while it computes others.

They are computed as meshpar's own layers compute theirs, see `collectives.matmul`.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import jax

from meshpar.collectives.matmul import all_gather_matmul, matmul_reduce_scatter
from meshpar.collectives.ring import Ring
from meshpar.parallel.context import ParallelContext
from meshpar.partition.layout import Move
from meshpar.partition.plan import COLLECTIVE_MATMUL
from meshpar.partition.program import Program, Register, Step, Use

BRANCHES = {"cond", "while"}


def streamed(program: Program, ctx: ParallelContext) -> Program:
    """The program with its products in chunks, where `ctx` asks for it; else the program itself."""
    axes = ctx.axes("residual_seq")
    if ctx.parallel.tensor.overlap == "none" or not axes:
        return program
    ring = Ring(axes, both_ways=ctx.parallel.tensor.overlap == "bidirectional")
    return _gathering(_scattering(program, ring), ring)


def streams(program: Program, ctx: ParallelContext) -> bool:
    """Whether a product of the program, or of one that it contains, is computed in chunks.

    Branches, and loops of unknown length, compute products whole: a ring's permutes wait for all devices of the mesh.
    """
    inner = (one for step in program.steps if step.source.name not in BRANCHES for one, _ in step.inner)
    return streamed(program, ctx) is not program or any(streams(one, ctx) for one in inner)


# Scattered results --------------------------------------------------------------------------------------------------


def _scattering(program: Program, ring: Ring) -> Program:
    layouts, steps = list(program.layouts), list(program.steps)
    for place, step in enumerate(steps):
        if step.equation is None or step.then:
            continue
        (register,) = step.outs
        uses = {use for use in _uses(program) if use.register == register}
        move = _only_move(program, uses, "reduce-scatter", ring)
        if move is None:
            continue
        (use,) = uses
        layouts[register] = replace(layouts[register], axes=use.axes, pending=())
        steps[place] = replace(step, compute=_scattered(step, move, ring), source=_named(step), equation=None)
    return replace(program, layouts=layouts, steps=steps) if steps != program.steps else program


def _scattered(step: Step, move: Move, ring: Ring) -> Callable[..., Any]:
    assert step.equation is not None
    left, right, result = step.equation

    def compute(x: jax.Array, w: jax.Array) -> list[jax.Array]:
        return [matmul_reduce_scatter(f"{left},{right}->{result}", x, w, ring, dim=result[move.dim])]

    return compute


# Gathered operands --------------------------------------------------------------------------------------------------


def _gathering(program: Program, ring: Ring) -> Program:
    readers: dict[Use, list[Step]] = {}
    for step in program.steps:
        for use in step.ins:
            readers.setdefault(use, []).append(step)
    for use, steps in readers.items():
        move = _only_move(program, {use}, "all-gather", ring)
        is_kept = use in program.outputs or any(step.equation is None or step not in program.steps for step in steps)
        if (
            move
            and move.varies
            and not is_kept
            and all(use not in step.ins[2:] for step in steps)
            and all(Counter(step.ins)[use] == 1 for step in steps)
        ):
            group = _group(program, use, steps, move, ring)
            ordered = in_order_of_reads([group, *(step for step in program.steps if step not in steps)], program)
            program = replace(program, steps=ordered) if ordered else program
    return program


def _group(program: Program, use: Use, steps: Sequence[Step], move: Move, ring: Ring) -> Step:
    """One step of all products that read a gathered value."""
    own = Use(use.register, program.layouts[use.register].axes, use.varies)
    others = [next(one for one in step.ins[:2] if one != use) for step in steps]
    more = [step.ins[2:] for step in steps]
    equations = [_of_common_letters(step, step.ins.index(use)) for step in steps]
    dim = string.ascii_uppercase[move.dim]

    def compute(x: jax.Array, *arrays: jax.Array) -> Sequence[jax.Array]:
        left = iter(arrays[len(steps) :])
        products = all_gather_matmul(equations, x, arrays[: len(steps)], ring, dim=dim)
        return [
            step.then(y, *(next(left) for _ in rest))[0] if step.then else y
            for step, y, rest in zip(steps, products, more, strict=True)
        ]

    outs = tuple(step.outs[0] for step in steps)
    return Step(compute, (own, *others, *chain(*more)), outs, _named(steps[0]))


def _of_common_letters(step: Step, of_x: int) -> str:
    """The equation of a product, first the gathered operand, whose dims are A, B, C in each equation."""
    assert step.equation is not None
    *operands, result = step.equation
    common = str.maketrans(operands[of_x], string.ascii_uppercase[: len(operands[of_x])])
    return f"{operands[of_x]},{operands[1 - of_x]}->{result}".translate(common)


def in_order_of_reads(steps: list[Step], program: Program) -> list[Step] | None:
    """The steps, each after those that it reads; None if a product reads the result of another one of its group."""
    places = {out: place for place, step in enumerate(program.steps) for out in step.outs}
    left = sorted(steps, key=lambda step: min(places[out] for out in step.outs) if step.outs else len(places))
    done: set[Register] = {*range(len(program.layouts))} - {*places}
    ordered: list[Step] = []
    while left:
        ready = next((i for i, step in enumerate(left) if all(use.register in done for use in step.ins)), None)
        if ready is None:
            return None
        step = left.pop(ready)
        ordered.append(step)
        done |= {*step.outs}
    return ordered


# Uses ---------------------------------------------------------------------------------------------------------------


def _uses(program: Program) -> Iterable[Use]:
    return (*(use for step in program.steps for use in step.ins), *program.outputs)


def _only_move(program: Program, uses: set[Use], kind: str, ring: Ring) -> Move | None:
    """The move of a value that is used in one form alone, if it is of this kind and over the axes of the ring."""
    if len(uses) != 1:
        return None
    (use,) = uses
    found = use.moves(program.layouts[use.register], program.sizes)
    is_it = len(found) == 1 and found[0].kind == kind and found[0].axes == ring.axes and not use.partial
    return found[0] if is_it else None


def _named(step: Step) -> Any:
    return replace(step.source, name=COLLECTIVE_MATMUL)
