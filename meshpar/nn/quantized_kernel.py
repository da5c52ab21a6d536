"""Kernels that are stored as integers, and dequantized right before their product.

    w[k, n] = codes[k, n] * scales[k // group, n]       codes in -127..127 (int8) or -7..7 (int4)

A scale is the largest magnitude of its group over the largest code. Weights are rounded to the nearest code. Two 4-bit
codes share a byte: input 2i in its low bits and input 2i + 1 in its high bits, each plus 8.

Source: Dettmers et al. 2022, arXiv:2208.07339 (int8); Frantar et al. 2023, arXiv:2210.17323, section 2 (groups,
rounding to nearest).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar.config import Config, Positive
from meshpar.errors import Problems
from meshpar.parallel.precision import wide


class Quantized(Config):
    """Stores the kernels of projections as integers. `meshpar compress` quantizes those of a trained model.

    Memory: 1 byte (int8) or half a byte (int4) for each weight, and a scale for each group.
    """

    shorthand: ClassVar = "kind"
    kind: Literal["int8", "int4"] = "int8"
    """The integers: 8 bits, or 4 bits, two in a byte."""
    group: Positive = 64
    """How many consecutive inputs of an output share a scale. A dim with fewer inputs is one group."""

    @property
    def largest(self) -> int:
        """The largest code."""
        return 127 if self.kind == "int8" else 7

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
        return num_inputs + num_inputs % 2 if self.kind == "int4" else num_inputs

    def check(self, path: str, num_inputs: int, problems: Problems) -> None:
        """Adds a problem if the inputs of a kernel cannot be divided into groups.

        Args:
          num_inputs: the size of the kernel's last input dim.
        """
        group = self.group_of(num_inputs)
        if num_inputs % group:
            fits = max(size for size in range(1, group) if num_inputs % size == 0)
            problems.add(path, f"its {num_inputs} inputs cannot be divided into groups of {group}", f"group={fits}")
        elif self.kind == "int4" and num_inputs % 2:
            problems.add(path, f"int4 stores pairs, and it has {num_inputs} inputs", "weights=int8")

    def quantize(self, kernel: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
        """The codes and scales of a kernel.

        Args:
          kernel: [..., inputs, outputs...].
          dim: the index of the dim that is divided into groups.

        Returns:
          int8 codes like the kernel, or uint8 with half as many inputs; scales with inputs / group, in the kernel's
          dtype. The codes are those nearest to the weights with these rounded scales.
        """
        shape = kernel.shape
        group = self.group_of(shape[dim])
        groups = wide(kernel).reshape(*shape[:dim], shape[dim] // group, group, *shape[dim + 1 :])
        scales = (jnp.abs(groups).max(dim + 1, keepdims=True) / self.largest).astype(kernel.dtype)
        codes = nearest_codes(groups, scales.astype(groups.dtype), self.largest).reshape(shape)
        return (codes if self.kind == "int8" else _packed(codes, dim)), scales.squeeze(dim + 1)

    def dequantize(self, codes: jax.Array, scales: jax.Array, dim: int) -> jax.Array:
        """The kernel, in the dtype of the scales; see `quantize`."""
        codes = codes if self.kind == "int8" else _unpacked(codes, dim)
        shape = codes.shape
        num_groups = scales.shape[dim]
        groups = codes.reshape(*shape[:dim], num_groups, shape[dim] // num_groups, *shape[dim + 1 :])
        return (groups.astype(scales.dtype) * jnp.expand_dims(scales, dim + 1)).reshape(shape)


def nearest_codes(x: jax.Array, scales: jax.Array, largest: int) -> jax.Array:
    """int8 like x: the integers up to `largest` for which `codes * scales` is nearest to x; 0 where a scale is 0.

    Args:
      scales: like x, or with dims of size 1.
    """
    steps = x / jnp.where(scales == 0, jnp.ones_like(scales), scales)
    return jnp.clip(jnp.round(steps), -largest, largest).astype(jnp.int8)


def _packed(codes: jax.Array, dim: int) -> jax.Array:
    """uint8 with two codes of 4 bits in each byte, of neighbours along a dim."""
    nibbles = (codes + 8).astype(jnp.uint8)
    low = jax.lax.slice_in_dim(nibbles, 0, None, 2, dim)
    high = jax.lax.slice_in_dim(nibbles, 1, None, 2, dim)
    return low | (high << 4)


def _unpacked(packed: jax.Array, dim: int) -> jax.Array:
    pairs = jnp.stack([packed & 15, packed >> 4], axis=dim + 1).astype(jnp.int8) - jnp.int8(8)
    return pairs.reshape(*packed.shape[:dim], 2 * packed.shape[dim], *packed.shape[dim + 1 :])


class QuantizedKernel(nnx.Module):
    """The codes and scales of a kernel, with the names of its dims. The rules shard them like the kernel."""

    def __init__(self, kernel: nnx.Param, how: Quantized, dim: int):
        dims = kernel.get_metadata()["dims"]
        codes, scales = how.quantize(kernel[...], dim)
        self.codes = nnx.Param(codes, dims=dims)
        self.scales = nnx.Param(scales, dims=dims)
        self.how = how
        self.from_end = kernel.ndim - dim

    def dequantized(self) -> jax.Array:
        """The kernel, in the dtype of the computation. Within a layer it has no dim of layers."""
        codes = self.codes[...]
        return self.how.dequantize(codes, self.scales[...], codes.ndim - self.from_end)


def is_quantized(path: str) -> bool:
    """Whether the parameter at this path is a part of a quantized kernel, which is never trained."""
    return path.endswith((".kernel.codes", ".kernel.scales"))
