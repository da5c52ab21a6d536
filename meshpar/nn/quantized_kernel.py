"""Kernels that are stored as codes, and dequantized right before their product.

    w[k, n] = level(codes[k, n]) * scales[k // group, n]

A level is the code itself, in -127..127 (int8) or -7..7 (int4), and a scale is the largest magnitude of its group over
the largest code. Or it is the quantile of a normal distribution that the code numbers, in -1..1 (nf4), and a scale is
the largest magnitude. Weights are rounded to the nearest level. Two 4-bit codes share a byte: input 2i in its low bits
and input 2i + 1 in its high bits; those of int4 plus 8.

With double quantization the scales are stored as int8 too, with a step and a mean for each output:

    scales[g, n] = codes'[g, n] * steps[n] + means[n]

Source: Dettmers et al. 2022, arXiv:2208.07339 (int8); Frantar et al. 2023, arXiv:2210.17323, section 2 (groups,
rounding to nearest); Dettmers et al. 2023, arXiv:2305.14314 (nf4, double quantization).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar.collectives.codec import decode, encode
from meshpar.config import Config, Positive
from meshpar.errors import Problems
from meshpar.parallel.precision import wide

STORED = ("codes", "scales", "steps", "means")
"""The names of the arrays of a kernel; the last two only with double quantization."""
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The levels of nf4, as the reference implementation prints them: quantiles of the normal distribution over their
largest magnitude, and exactly zero."""


class Quantized(Config):
    """Stores the kernels of projections as codes: of a trained model, or of a Hugging Face folder for QLoRA.

    Memory: 1 byte (int8) or half a byte (int4, nf4) for each weight. And a scale for each group: of the kernel's dtype;
      or with `double` 1 byte, and two numbers of the kernel's dtype for each output.
    """

    shorthand: ClassVar = "kind"
    kind: Literal["int8", "int4", "nf4"] = "int8"
    """The codes: integers of 8 or 4 bits, or 4-bit NormalFloat, the 16 quantiles of QLoRA."""
    group: Positive = 64
    """How many consecutive inputs of an output share a scale."""
    double: bool = False
    """Whether the scales are quantized too, to int8."""

    @property
    def largest(self) -> int:
        """The largest level: the magnitude of the largest weight of a group is so many scales."""
        return {"int8": 127, "int4": 7, "nf4": 1}[self.kind]

    @property
    def is_packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.kind != "int8"

    def group_of(self, num_inputs: int) -> int:
        """The size of the groups of a dim."""
        return min(self.group, num_inputs)

    def fitting(self, num_inputs: int) -> int:
        """The smallest number of inputs from this one on that can be divided into groups.

        >>> [Quantized(kind="int4", group=8).fitting(size) for size in (3, 8, 9)]
        [4, 8, 16]
        """
        if num_inputs > self.group:
            return -(-num_inputs // self.group) * self.group
        return num_inputs + num_inputs % 2 if self.is_packed else num_inputs

    def check(self, path: str, num_inputs: int, problems: Problems) -> None:
        """Adds a problem if the inputs of a kernel cannot be divided into groups.

        Args:
          num_inputs: the size of the kernel's last input dim.
        """
        group = self.group_of(num_inputs)
        if num_inputs % group:
            fits = max(size for size in range(1, group) if num_inputs % size == 0)
            problems.add(path, f"its {num_inputs} inputs cannot be divided into groups of {group}", f"group={fits}")
        elif self.is_packed and num_inputs % 2:
            problems.add(path, f"{self.kind} stores pairs, and it has {num_inputs} inputs", "weights=int8")

    def quantize(self, kernel: jax.Array, dim: int, num_inputs: int = 1) -> dict[str, jax.Array]:
        """The arrays that are stored for a kernel, by their names in `STORED`.

        Args:
          kernel: [..., inputs..., outputs...].
          dim: the index of the last input dim, which is divided into groups.
          num_inputs: the number of input dims.

        Returns:
          int8 codes like the kernel, or uint8 with half as many inputs. Scales with inputs / group, in the kernel's
          dtype; or int8 ones, with steps and means [..., outputs...] in the kernel's dtype. The codes are those nearest
          to the weights with these rounded scales.
        """
        shape = kernel.shape
        group = self.group_of(shape[dim])
        groups = wide(kernel).reshape(*shape[:dim], shape[dim] // group, group, *shape[dim + 1 :])
        largest = jnp.abs(groups).max(dim + 1) / self.largest
        stored = {"scales": largest.astype(kernel.dtype)}
        if self.double:
            stored = _quantized_scales(largest, kernel.dtype, tuple(range(dim - num_inputs + 1, dim + 1)))
        scales = jnp.expand_dims(_scales(stored, dim, num_inputs), dim + 1).astype(groups.dtype)
        if self.kind == "nf4":
            codes = _nearest_levels(groups, scales).reshape(shape)
            return {"codes": _packed(codes, dim)} | stored
        codes = encode(groups, scales, largest=self.largest).reshape(shape)
        return {"codes": _packed(codes + 8, dim) if self.is_packed else codes} | stored

    def dequantize(self, stored: Mapping[str, jax.Array], dim: int, num_inputs: int = 1) -> jax.Array:
        """The kernel, in the dtype of its scales; see `quantize`."""
        scales = _scales(stored, dim, num_inputs)
        codes = _unpacked(stored["codes"], dim) if self.is_packed else stored["codes"]
        shape = codes.shape
        num_groups = scales.shape[dim]
        groups = codes.reshape(*shape[:dim], num_groups, shape[dim] // num_groups, *shape[dim + 1 :])
        if self.kind == "nf4":
            groups = jnp.asarray(NF4, scales.dtype)[groups]
        elif self.is_packed:
            groups = groups - jnp.int8(8)
        return decode(groups, jnp.expand_dims(scales, dim + 1)).reshape(shape)


def _quantized_scales(scales: jax.Array, dtype: Any, inputs: tuple[int, ...]) -> dict[str, jax.Array]:
    """int8 scales, and the step and the mean of each output."""
    means = scales.mean(inputs, keepdims=True).astype(dtype)
    steps = (jnp.abs(scales - means.astype(scales.dtype)).max(inputs, keepdims=True) / 127).astype(dtype)
    codes = encode(scales - means.astype(scales.dtype), steps.astype(scales.dtype))
    return {"scales": codes, "steps": steps.squeeze(inputs), "means": means.squeeze(inputs)}


def _scales(stored: Mapping[str, jax.Array], dim: int, num_inputs: int) -> jax.Array:
    """The scales of the groups, as floats."""
    if "steps" not in stored:
        return stored["scales"]
    inputs = tuple(range(dim - num_inputs + 1, dim + 1))
    steps, means = (jnp.expand_dims(stored[name], inputs) for name in ("steps", "means"))
    return decode(stored["scales"], steps) + means


def _nearest_levels(x: jax.Array, scales: jax.Array) -> jax.Array:
    """int8 like x: the numbers of the levels of nf4 for which `level * scales` is nearest to x."""
    levels = jnp.asarray(NF4, x.dtype)
    ones = jnp.ones_like(scales)
    borders = (levels[1:] + levels[:-1]) / 2
    return jnp.searchsorted(borders, x / jnp.where(scales == 0, ones, scales)).astype(jnp.int8)


def _packed(codes: jax.Array, dim: int) -> jax.Array:
    """uint8 with two codes of 0 to 15 in each byte, of neighbours along a dim."""
    nibbles = codes.astype(jnp.uint8)
    low = jax.lax.slice_in_dim(nibbles, 0, None, 2, dim)
    high = jax.lax.slice_in_dim(nibbles, 1, None, 2, dim)
    return low | (high << 4)


def _unpacked(packed: jax.Array, dim: int) -> jax.Array:
    pairs = jnp.stack([packed & 15, packed >> 4], axis=dim + 1).astype(jnp.int8)
    return pairs.reshape(*packed.shape[:dim], 2 * packed.shape[dim], *packed.shape[dim + 1 :])


class QuantizedKernel(nnx.Module):
    """The codes and scales of a kernel, with the names of its dims. The rules shard them like the kernel.

    Args:
      dim: the index of the kernel's last input dim.
      num_inputs: the number of its input dims.
    """

    def __init__(self, kernel: nnx.Param, how: Quantized, dim: int, num_inputs: int):
        dims = kernel.get_metadata()["dims"]
        stored = how.quantize(kernel[...], dim, num_inputs)
        outputs = dims[: dim + 1 - num_inputs] + dims[dim + 1 :]
        self.codes = nnx.Param(stored["codes"], dims=dims)
        self.scales = nnx.Param(stored["scales"], dims=dims)
        self.steps = nnx.Param(stored["steps"], dims=outputs) if how.double else None
        self.means = nnx.Param(stored["means"], dims=outputs) if how.double else None
        self.how = how
        self.from_end = kernel.ndim - dim
        self.num_inputs = num_inputs
        self.shape = kernel.shape
        self.dims = dims

    def dequantized(self) -> jax.Array:
        """The kernel, in the dtype of the computation. Within a layer it has no dim of layers."""
        arrays = {name: getattr(self, name) for name in STORED}
        return self.of({name: x[...] for name, x in arrays.items() if x is not None})

    def of(self, stored: Mapping[str, jax.Array]) -> jax.Array:
        """The kernel that other arrays of this form stand for."""
        return self.how.dequantize(stored, stored["codes"].ndim - self.from_end, self.num_inputs)


def is_quantized(path: str) -> bool:
    """Whether the parameter at this path is a part of a quantized kernel, which is never trained."""
    return path.endswith(tuple(f".kernel.{name}" for name in STORED))
