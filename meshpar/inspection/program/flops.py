"""Floating point operations of a compiled program, loops counted as often as they run.

XLA's own cost analysis counts the body of a loop once. Here the products are counted where they stand: a matrix
product of K terms an element is 2K operations an element. What is not a product (norms, softmax, the optimizer) is
not counted: model FLOPs are those of products, by the convention of Megatron-LM and PaLM.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import numpy as np

from meshpar.inspection.program.text import Array, Instruction, Program
from meshpar.inspection.program.walk import Visit

_GEMM = re.compile(r"gemm|cublas|onednn|matmul", re.IGNORECASE)
_LABELS = re.compile(r"dim_labels=(\w+?)_(\w+)->(\w+)")
# Of TPU and GPU programs: they only allocate, assert or wait.
_EMPTY = re.compile(r"Allocate|Assume|AsyncCollective|Sharding|SPMD")
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
    targets = {_target(one) for one in calls}
    return tuple(sorted(target for target in targets if not _GEMM.search(target) and not _EMPTY.search(target)))


def _flops(program: Program, one: Instruction) -> int:
    if one.opcode == "dot":
        return 2 * one.arrays[0].size * _contracted(one, _operand(program, one, 0))
    if one.opcode == "convolution":
        return 2 * _convolution_terms(one, _operand(program, one, 0), _operand(program, one, 1))
    if one.opcode == "custom-call" and _GEMM.search(_target(one)):
        return 2 * one.arrays[0].size * _contracted(one, _operand(program, one, 0))
    return 0


def _contracted(one: Instruction, left: Array) -> int:
    """K: the product of the left operand's contracted dims, which a GEMM call keeps in its backend config."""
    match = re.search(r'lhs_contracting_dim(?:s|ensions)"?[=:][\[{]([\d,"]*)[\]}]', one.rest)
    dims = [int(dim) for dim in re.findall(r"\d+", match[1])] if match else [-1]
    return math.prod(left.shape[dim] for dim in dims)


def _convolution_terms(one: Instruction, image: Array, kernel: Array) -> int:
    """Products that a convolution sums, those with padding and between dilated elements left out.

    TPUs spell batched matrix products as dilated convolutions, of which all but the diagonal is such holes.
    """
    labels = _LABELS.search(one.attributes)
    assert labels is not None, f"a convolution without dim_labels: {one.rest[:160]}"
    of = [
        dict(zip(label, array.shape, strict=True))
        for label, array in zip(labels.groups(), (image, kernel, one.arrays[0]), strict=True)
    ]
    terms = of[2]["b"] * of[2]["f"] * of[1]["i"]
    for i in range(len(image.shape) - 2):
        terms *= _meetings(of[0][str(i)], of[1][str(i)], of[2][str(i)], _window(one, i))
    return terms


def _window(one: Instruction, dim: int) -> dict[str, int]:
    """Stride, padding before and dilations of one spatial dim."""
    match = re.search(r"window=\{([^}]*)\}", one.attributes)
    fields = dict(field.split("=") for field in match[1].split()) if match else {}
    return {name: int(values.split("x")[dim].split("_")[0]) for name, values in fields.items()}


def _meetings(image: int, kernel: int, out: int, window: dict[str, int]) -> int:
    """How many pairs of an output and a kernel element meet an element of the image."""
    dilation = window.get("lhs_dilate", 1)
    at = np.arange(out)[:, None] * window.get("stride", 1) - window.get("pad", 0)
    at = at + np.arange(kernel) * window.get("rhs_dilate", 1)
    return int(((at >= 0) & (at <= (image - 1) * dilation) & (at % dilation == 0)).sum())


def _operand(program: Program, one: Instruction, number: int) -> Array:
    return program.computation(one.computation)[one.operands[number]].arrays[0]


def _target(one: Instruction) -> str:
    match = _TARGET.search(one.rest)
    return match[1] if match else ""
