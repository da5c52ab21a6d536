"""Floating point operations of a compiled program, loops counted as often as they run.

XLA's own cost analysis counts the body of a loop once. Here the products are counted where they stand: a matrix
product of K terms an element is 2K operations an element. What is not a product (norms, softmax, the optimizer) is
not counted: model FLOPs are those of products, by the convention of Megatron-LM and PaLM.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from meshpar.inspection.program import Array, Instruction, Program
from meshpar.inspection.walk import Visit

_GEMM = re.compile(r"gemm|cublas|onednn|matmul", re.IGNORECASE)
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


def product_flops(program: Program, visits: Iterable[Visit]) -> int:
    """FLOPs of all matrix products and convolutions in one call of the program, on one device.

    Args:
      visits: the instructions that it executes, from `walk`. Of a conditional, each branch counts.
    """
    return sum((visit.times or 0) * _flops(program, visit.instruction) for visit in visits)


def opaque_calls(visits: Iterable[Visit]) -> tuple[str, ...]:
    """The targets of custom calls, whose operations and communication no text tells (a Pallas kernel, say)."""
    calls = (visit.instruction for visit in visits if visit.instruction.opcode == "custom-call")
    return tuple(sorted({_target(one) for one in calls if not _GEMM.search(_target(one))}))


def _flops(program: Program, one: Instruction) -> int:
    if one.opcode == "dot":
        return 2 * one.arrays[0].size * _contracted(one, _operand(program, one, 0))
    if one.opcode == "convolution":
        return 2 * one.arrays[0].size * _kernel_terms(one, _operand(program, one, 1))
    if one.opcode == "custom-call" and _GEMM.search(_target(one)):
        return 2 * one.arrays[0].size * _contracted(one, _operand(program, one, 0))
    return 0


def _contracted(one: Instruction, left: Array) -> int:
    """K: the product of the left operand's contracted dims, which a GEMM call keeps in its backend config."""
    match = re.search(r'lhs_contracting_dim(?:s|ensions)"?[=:][\[{]([\d,"]*)[\]}]', one.rest)
    dims = [int(dim) for dim in re.findall(r"\d+", match[1])] if match else [-1]
    return math.prod(left.shape[dim] for dim in dims)


def _kernel_terms(one: Instruction, kernel: Array) -> int:
    """Terms that each element sums: all dims of the kernel but its output features."""
    labels = re.search(r"dim_labels=[^_]+_(\w+)->", one.attributes)
    assert labels is not None, f"a convolution without dim_labels: {one.rest[:160]}"
    return math.prod(size for size, label in zip(kernel.shape, labels[1], strict=True) if label != "o")


def _operand(program: Program, one: Instruction, number: int) -> Array:
    return program.computation(one.computation)[one.operands[number]].arrays[0]


def _target(one: Instruction) -> str:
    match = _TARGET.search(one.rest)
    return match[1] if match else ""
