"""Counts the floating point operations of the products in a traced program, without compiling it.

A matrix product that sums K terms for each element of its result has 2K operations per element. Other operations
(norms, softmax, the optimizer) are not counted, by the convention of Megatron-LM and PaLM. Products that remat
recomputes are counted.

`inspection.program.flops` counts the products of a compiled program; the two share no code, so that each checks the
other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr

from meshpar.cost.walk import Visit, walk
from meshpar.errors import ProgramError
from meshpar.parallel.scopes import declared_flops, needed_part


@dataclass(frozen=True)
class ProductSizes:
    """What the time of one run of a product depends on.

    Args:
      kind: see `Product`.
      num_flops: operations.
      batch, rows, columns, terms: a batch of products [rows, terms] x [terms, columns]. For an attention kernel: rows
        of heads, queries, keys, and the size of a head. All 1 for a kernel whose sizes are not known.
      width: bytes of an element of the narrower operand.
      num_bytes: bytes of the operands and of the result.
    """

    kind: str
    num_flops: int
    batch: int = 1
    rows: int = 1
    columns: int = 1
    terms: int = 1
    width: int = 4
    num_bytes: int = 0

    @property
    def is_attention(self) -> bool:
        return self.kind.startswith("dot_product_attention")

    def divided(self, parts: int) -> ProductSizes:
        """A part of the product: of the batch, then of the largest size, that of the tokens of a whole batch."""
        batched = math.gcd(self.batch, parts)
        sizes = {"rows": self.rows, "columns": self.columns, "terms": self.terms}
        largest = max(sizes, key=sizes.__getitem__)
        return replace(
            self,
            num_flops=self.num_flops // parts,
            batch=self.batch // batched,
            num_bytes=self.num_bytes // parts,
            **{largest: max(1, sizes[largest] * batched // parts)},
        )


@dataclass(frozen=True)
class Product:
    """The matrix products or convolutions of one equation.

    Args:
      kind: `dot_general`, `conv_general_dilated`, `ragged_dot_general`; or a kernel, which has several products.
      num_flops: operations of one run: of one device inside a manual region (`shard_map`), of whole arrays outside,
        where GSPMD divides them.
      num_shards: the number of devices that run it on different shards; 1 outside of manual regions.
      times: how often one call of the program runs it.
      needed: the part of it that the model needs, see `needed`.
      sizes: of one run.
      loops: see `walk.Visit`.
    """

    kind: str
    num_flops: int
    num_shards: int = 1
    times: Fraction = Fraction(1)
    needed: Fraction = Fraction(1)
    sizes: ProductSizes = ProductSizes("", 0)
    loops: tuple[int, ...] = ()

    @property
    def total(self) -> Fraction:
        """Operations on all devices in one call of the program."""
        return self.times * self.num_flops * self.num_shards


def traced_products(program: ClosedJaxpr, mean: bool = False) -> list[Product]:
    """The products of a traced program, in its order.

    Args:
      program: the result of `jax.make_jaxpr`.
      mean: count the mean of all stages of a pipeline instead of a stage with both ends of the model.

    Raises:
      ProgramError: a `while` of unknown length contains a product.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> power = lambda x: jax.lax.scan(lambda y, _: (y @ x, None), x, None, length=3)[0]
      >>> flops(traced_products(jax.make_jaxpr(power)(jnp.ones((8, 8)))))
      {'dot_general': Fraction(3072, 1)}
    """
    found = []
    for visit in walk(program, mean):
        num_flops = _num_flops(visit)
        if num_flops is None:
            continue
        if visit.times is None:
            raise ProgramError(f"{visit.primitive}: in a while loop, which may run any number of times")
        part, sizes = needed_part(visit.scope), _sizes(visit, num_flops)
        found.append(Product(visit.primitive, num_flops, visit.num_shards, visit.times, part, sizes, visit.loops))
    return found


def flops(found: Iterable[Product], num_devices: int = 1) -> dict[str, Fraction]:
    """Operations of one device by kind of product, if GSPMD divides products outside of manual regions evenly."""
    total: dict[str, Fraction] = defaultdict(Fraction)
    for one in found:
        total[one.kind] += one.total / num_devices
    return dict(total)


def needed_flops(found: Iterable[Product]) -> Fraction:
    """Operations that a model needs, see `needed`."""
    return sum((one.total * one.needed for one in found), Fraction(0))


def _num_flops(visit: Visit) -> int | None:
    """Operations of one run of an equation; None if it has no product, or contains equations that are visited."""
    if visit.primitive == "pallas_call":
        return declared_flops(visit.scope)
    return 2 * PRODUCTS[visit.primitive](visit.equation) if visit.primitive in PRODUCTS else None


def _sizes(visit: Visit, num_flops: int) -> ProductSizes:
    """The sizes of a product, by its operands."""
    equation = visit.equation
    operands = [var.aval for var in equation.invars if getattr(var.aval, "shape", ())]
    results = [var.aval for var in equation.outvars if getattr(var.aval, "shape", ())]
    num_bytes = sum(array.size * array.dtype.itemsize for array in [*operands, *results])
    width = min((array.dtype.itemsize for array in operands[:2]), default=4)
    shape = _SHAPES.get(visit.primitive, lambda equation: (1, 1, 1, 1))(equation)
    return ProductSizes(visit.primitive, num_flops, *shape, width=width, num_bytes=num_bytes)


def _dot_shape(equation: Any) -> Sequence[int]:
    """Batch, rows, columns and terms of a matrix product."""
    left, right = (operand.aval.shape for operand in equation.invars[:2])
    (contracted, contracted_right), (batched, batched_right) = equation.params["dimension_numbers"]
    batch = math.prod(left[dim] for dim in batched)
    terms = math.prod(left[dim] for dim in contracted)
    rows = math.prod(size for dim, size in enumerate(left) if dim not in {*contracted, *batched})
    columns = math.prod(size for dim, size in enumerate(right) if dim not in {*contracted_right, *batched_right})
    return batch, rows, columns, terms


def _ragged_shape(equation: Any) -> Sequence[int]:
    """Each group of rows has a product of its own, of the mean number of rows."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    left, right = (operand.aval.shape for operand in equation.invars[:2])
    (contracted, contracted_right), (_, batched_right) = numbers.dot_dimension_numbers
    groups = math.prod(right[dim] for dim in numbers.rhs_group_dimensions) or 1
    terms = math.prod(left[dim] for dim in contracted)
    held = {*contracted_right, *batched_right, *numbers.rhs_group_dimensions}
    columns = math.prod(size for dim, size in enumerate(right) if dim not in held)
    return groups, max(1, math.prod(left) // terms // groups), columns, terms


def _convolution_shape(equation: Any) -> Sequence[int]:
    """A convolution as the product of its windows with the kernel."""
    numbers = equation.params["dimension_numbers"]
    kernel = equation.invars[1].aval.shape
    out = equation.outvars[0].aval.shape
    columns = out[numbers.out_spec[1]]
    return 1, math.prod(out) // columns, columns, math.prod(kernel) // kernel[numbers.rhs_spec[0]]


def _attention_shape(equation: Any) -> Sequence[int]:
    batch, seq, heads, size = equation.invars[0].aval.shape
    return batch * heads, seq, equation.invars[1].aval.shape[1], size


_SHAPES: dict[str, Callable[[Any], Sequence[int]]] = {
    "dot_general": _dot_shape,
    "ragged_dot_general": _ragged_shape,
    "conv_general_dilated": _convolution_shape,
    "dot_product_attention_fwd_wrapper": _attention_shape,
    "dot_product_attention_bwd_wrapper": _attention_shape,
}


def _ragged_terms(equation: Any) -> int:
    """The number of products that a ragged product sums: each row is multiplied by one group."""
    return equation.invars[0].aval.size * _ragged_shape(equation)[2]


def _convolution_terms(equation: Any) -> int:
    """The number of products that a convolution sums, without products with padding or with holes of a dilation."""
    params = equation.params
    numbers = params["dimension_numbers"]
    image, kernel = (operand.aval.shape for operand in equation.invars)
    (out,) = (result.aval.shape for result in equation.outvars)
    terms = out[numbers.out_spec[0]] * out[numbers.out_spec[1]] * kernel[numbers.rhs_spec[1]]
    windows = zip(
        numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:],
        params["window_strides"], params["padding"], params["lhs_dilation"], params["rhs_dilation"], strict=True,
    )  # fmt: skip
    for i, k, o, stride, (before, _), of_image, of_kernel in windows:
        at = np.arange(out[o])[:, None] * stride - before + np.arange(kernel[k]) * of_kernel
        terms *= int(((at >= 0) & (at <= (image[i] - 1) * of_image) & (at % of_image == 0)).sum())
    return terms


def _attention_terms(equation: Any, num_products: int) -> int:
    """The number of products that cuDNN's attention sums, counting only visible scores.

    The program does not contain the kernel's tiles. A diagonal tile is computed whole, so a device computes a few more.
    """
    batch, seq, heads, size = equation.invars[0].aval.shape
    num_keys = equation.invars[1].aval.shape[1]
    width = min(equation.params["sliding_window_length"] or num_keys, num_keys)
    mask = equation.params["mask_type"].name
    assert mask in ("CAUSAL", "NO_MASK"), mask
    hidden = width**2 // 2 if mask == "CAUSAL" else 0
    return num_products * batch * heads * size * (seq * width - hidden)


PRODUCTS: dict[str, Callable[[Any], int]] = {
    "dot_general": lambda equation: math.prod(_dot_shape(equation)),
    "ragged_dot_general": _ragged_terms,
    "conv_general_dilated": _convolution_terms,
    # Forward: scores, result. Backward: scores, and the gradients of weights, queries, keys and values.
    "dot_product_attention_fwd_wrapper": partial(_attention_terms, num_products=2),
    "dot_product_attention_bwd_wrapper": partial(_attention_terms, num_products=5),
}
