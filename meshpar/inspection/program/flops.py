"""Counts the floating point operations of the products in a compiled program.

XLA's own cost analysis counts the body of a loop once; this module counts it as often as it runs. A matrix product that
sums K terms for each element of its result has 2K operations per element. Other operations (norms, softmax, the
optimizer) are not counted, by the convention of Megatron-LM and PaLM.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import numpy as np

from meshpar.inspection.program.text import ArrayType, Instruction, Program
from meshpar.inspection.program.walk import Visit
from meshpar.parallel.scopes import declared_flops

_GEMM = re.compile(r"gemm|cublas|onednn|matmul", re.IGNORECASE)
_LABELS = re.compile(r"dim_labels=(\w+?)_(\w+)->(\w+)")
# Custom calls of TPU and GPU programs that only allocate, assert or wait.
_EMPTY = re.compile(r"Allocate|Assume|AsyncCollective|Sharding|SPMD")
_CUDNN_PRODUCTS = {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 5}
"""cuDNN's attention -> its products: of the scores and the result; backward, of the scores and four gradients."""
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


def product_flops(program: Program, visits: Iterable[Visit]) -> int:
    """FLOPs of all matrix products and convolutions in one call of the program, on one device, rounded.

    Args:
      visits: the instructions that the program executes, from `walk`. Every branch of a conditional counts.
    """
    return round(sum((visit.times or 0) * _flops(program, visit.instruction) for visit in visits))


def opaque_calls(visits: Iterable[Visit]) -> tuple[str, ...]:
    """The targets of custom calls whose operations and communication are unknown, such as Pallas kernels."""
    targets = {_target(one) for one in (visit.instruction for visit in visits) if not _is_counted(one)}
    return tuple(sorted(target for target in targets if not _EMPTY.search(target)))


def _is_counted(one: Instruction) -> bool:
    """Whether the operations of an instruction are known: of a Pallas kernel, only if the program declares them."""
    target = _target(one)
    known = not target or _GEMM.search(target) or target in _CUDNN_PRODUCTS
    return bool(known) or (target == "tpu_custom_call" and declared_flops(one.op_name) is not None)


def _flops(program: Program, one: Instruction) -> int:
    inputs = program.computation(one.computation)
    target = _target(one)
    if one.opcode == "dot" or _GEMM.search(target):
        # A GEMM call has the contracted dims in its backend config.
        match = re.search(r'lhs_contracting_dim(?:s|ensions)"?[=:][\[{]([\d,"]*)[\]}]', one.rest)
        dims = [int(dim) for dim in re.findall(r"\d+", match[1])] if match else [-1]
        left = inputs[one.operands[0]].arrays[0]
        return 2 * one.arrays[0].size * math.prod(left.shape[dim] for dim in dims)
    if target in _CUDNN_PRODUCTS:
        return _attention_flops(one, inputs[one.operands[0]].arrays[0])
    if target == "tpu_custom_call":
        return declared_flops(one.op_name) or 0
    if one.opcode == "convolution":
        return 2 * _convolution_terms(one, *(inputs[name].arrays[0] for name in one.operands[:2]))
    return 0


def _attention_flops(one: Instruction, queries: ArrayType) -> int:
    """Operations of cuDNN's attention, counting only visible scores, because the kernel's tiles are unknown."""
    config = one.rest.partition("backend_config=")[2]
    shape = re.search(r'"dimensions": ?\["(\d+)", ?"(\d+)", ?"(\d+)", ?"(\d+)"\]', config)
    window = re.search(r'"sliding_window_length": ?(\d+)', config)
    assert shape and window, f"cuDNN's attention without its sizes: {config[:160]}"
    batch, heads, num_queries, num_keys = map(int, shape.groups())
    width = min(int(window[1]) or num_keys, num_keys)
    hidden = width**2 // 2 if re.search(r'"mask_type": ?"CAUSAL"', config) else 0
    return 2 * _CUDNN_PRODUCTS[_target(one)] * batch * heads * queries.shape[-1] * (num_queries * width - hidden)


def _convolution_terms(one: Instruction, image: ArrayType, kernel: ArrayType) -> int:
    """The number of products that a convolution sums, without products with padding or with the holes of a dilation.

    TPU programs express batched matrix products as dilated convolutions. All products but those on the diagonal are
    holes.
    """
    labels = _LABELS.search(one.attributes)
    assert labels is not None, f"a convolution without dim_labels: {one.rest[:160]}"
    arrays = (image, kernel, one.arrays[0])
    of_image, of_kernel, of_out = (
        dict(zip(label, array.shape, strict=True)) for label, array in zip(labels.groups(), arrays, strict=True)
    )
    window = re.search(r"window=\{([^}]*)\}", one.attributes)
    fields = dict(field.split("=") for field in window[1].split()) if window else {}
    terms = of_out["b"] * of_out["f"] * of_kernel["i"]
    for i in range(len(image.shape) - 2):
        # Stride, padding before and dilations of one spatial dim.
        sizes = {name: int(values.split("x")[i].split("_")[0]) for name, values in fields.items()}
        dilation = sizes.get("lhs_dilate", 1)
        at = np.arange(of_out[str(i)])[:, None] * sizes.get("stride", 1) - sizes.get("pad", 0)
        at = at + np.arange(of_kernel[str(i)]) * sizes.get("rhs_dilate", 1)
        last = (of_image[str(i)] - 1) * dilation
        terms *= int(((at >= 0) & (at <= last) & (at % dilation == 0)).sum())
    return terms


def _target(one: Instruction) -> str:
    """What a custom call calls; empty for another instruction."""
    match = _TARGET.search(one.rest) if one.opcode == "custom-call" else None
    return match[1] if match else ""
