"""One product of all kernels that multiply a value, where it is faster: on CPUs, if the value is wider than they are.

The backward of separate products adds a gradient of the value for each kernel. That of one product joins the gradients
of the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import jax

from meshpar.parallel.context import platform
from meshpar.partition.matmul import cut, matmul
from meshpar.partition.program import Program, Step, Use
from meshpar.partition.streamed import in_order_of_reads


def joint(program: Program) -> Program:
    """The program with one step for products of the same value, where that is faster."""
    if platform() != "cpu":
        return program
    readers: dict[Use, list[Step]] = {}
    for step in program.steps:
        if _num_contracted(step):
            readers.setdefault(step.ins[0], []).append(step)
    for steps in readers.values():
        if len(steps) > 1 and _are_narrow(program, steps):
            group = _group(steps)
            others = [step for step in program.steps if step not in steps]
            ordered = in_order_of_reads([group, *others], program)
            program = replace(program, steps=ordered) if ordered else program
    return program


def _num_contracted(step: Step) -> int:
    """How many dims a product of a layer's input and a kernel contracts: the last ones of the input; 0 for others."""
    if step.equation is None or step.then:
        return 0
    left, right, result = step.equation
    num = sum(letter in left for letter in right)
    return num if 0 < num < len(left) and left.endswith(right[:num]) and result == left[:-num] + right[num:] else 0


def _are_narrow(program: Program, steps: Sequence[Step]) -> bool:
    """Whether the kernels together are narrower than the value. All contract the same dims."""
    nums = {_num_contracted(step) for step in steps}
    if len(nums) > 1:
        return False
    (num,) = nums
    kernels = [_local_shape(program, step.ins[1]) for step in steps]
    return sum(map(math.prod, kernels)) < math.prod(kernels[0][:num]) ** 2


def _local_shape(program: Program, use: Use) -> tuple[int, ...]:
    layout = program.layouts[use.register]
    return (layout if use.axes is None else replace(layout, axes=use.axes)).local_shape(program.sizes)


def _group(steps: Sequence[Step]) -> Step:
    num = _num_contracted(steps[0])

    def compute(x: jax.Array, *kernels: jax.Array) -> list[jax.Array]:
        width = math.prod(kernels[0].shape[:num])
        matrices = [kernel.reshape(width, -1) for kernel in kernels]
        parts = cut(matmul(x.reshape(*x.shape[:-num], width), *matrices), matrices)
        return [y.reshape(*x.shape[:-num], *kernel.shape[num:]) for y, kernel in zip(parts, kernels, strict=True)]

    outs = tuple(step.outs[0] for step in steps)
    return Step(compute, (steps[0].ins[0], *(step.ins[1] for step in steps)), outs, steps[0].source)
