"""SwiGLU with the weights of several experts, for tokens that are sorted by expert, or that have places.

Shapes: N rows, E experts on this device, P places of an expert, D embed, M mlp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from meshpar.nn.experts.grouped import OfRows, grouped_dots
from meshpar.nn.layers import LowRank, normal, silu_product
from meshpar.nn.remat import named
from meshpar.parallel.linear import Adapter

Rows = tuple[jax.Array, ...]
Dots = Callable[[Rows, tuple[jax.Array, ...], OfRows], Rows]
"""(rows, matrices [experts, in, out], of_rows) -> the products of `of_rows(*rows)` with the matrices of each expert."""


class Matrices(NamedTuple):
    """A matrix of each expert on this device, and LoRA's update of it.

    Args:
      kernel: [experts, in, out].
      adapter: of matrices [experts, in, rank] and [experts, rank, out]; None without LoRA.
    """

    kernel: jax.Array
    adapter: Adapter | None = None

    def adapted(self, y: jax.Array, rows: Rows, dots: Dots, of_rows: OfRows) -> jax.Array:
        """The product `y` of rows with the kernel, and LoRA's term."""
        if self.adapter is None:
            return y
        narrow = dots(rows, (self.adapter.a,), of_rows)
        (change,) = dots(narrow, (self.adapter.b,), _itself)
        return y + self.adapter.scaled(change)


class ExpertWeights(NamedTuple):
    """The matrices of the experts on this device: gate and up [experts, embed, mlp], down [experts, mlp, embed]."""

    gate: Matrices
    up: Matrices
    down: Matrices

    @property
    def num(self) -> int:
        """The number of experts on this device."""
        return len(self.gate.kernel)

    def of_sorted(self, x_ND: Float[Array, "N D"], sizes_E: Int[Array, "E"], expected: int) -> Float[Array, "N D"]:
        """The results of rows that are sorted by expert; 0 for rows beyond the last expert's.

        Args:
          sizes_E: int32, the number of rows of each expert.
          expected: their sum, if the router is balanced.
        """

        def dots(rows: Rows, kernels: tuple[jax.Array, ...], of_rows: OfRows) -> Rows:
            return grouped_dots(rows, kernels, sizes_E, expected, of_rows)

        return self._swiglu(x_ND, dots)

    def of_places(self, x_BEPD: Float[Array, "B E P D"]) -> Float[Array, "B E P D"]:
        """The results of rows in places of experts."""

        def dots(rows: Rows, kernels: tuple[jax.Array, ...], of_rows: OfRows) -> Rows:
            x = of_rows(*rows)
            return tuple(jnp.einsum("bepi,eio->bepo", x, kernel) for kernel in kernels)

        return self._swiglu(x_BEPD, dots)

    def _swiglu(self, x: jax.Array, dots: Dots) -> jax.Array:
        gate, up = dots((x,), (self.gate.kernel, self.up.kernel), _itself)
        gate = named(self.gate.adapted(gate, (x,), dots, _itself), "gate")
        up = named(self.up.adapted(up, (x,), dots, _itself), "up")
        (y,) = dots((gate, up), (self.down.kernel,), silu_product)
        return self.down.adapted(y, (gate, up), dots, silu_product)


def _itself(x: jax.Array) -> jax.Array:
    return x


class ExpertProjection(nnx.Module):
    """A linear map for each expert: `x @ kernel[e]`, which LoRA can adapt.

    Args:
      inputs, outputs: (name, size) of these dims.
      std: standard deviation of the initial kernel.
    """

    num_inputs: ClassVar[int] = 1

    def __init__(
        self, num_experts: int, inputs: tuple[str, int], outputs: tuple[str, int], *, std: float, rngs: nnx.Rngs
    ):
        dims = ("experts", inputs[0], outputs[0])
        self.kernel = normal(rngs, (num_experts, inputs[1], outputs[1]), std, dims)
        self.lora: LowRank | None = nnx.data(None)

    @property
    def matrices(self) -> Matrices:
        return Matrices(self.kernel[...], self.lora and self.lora.adapter)


class RoutedExperts(nnx.Module):
    """The SwiGLU of each expert."""

    def __init__(self, num: int, width: int, hidden: int, *, out_std: float, rngs: nnx.Rngs):
        embed = ("embed", width)
        mlp = ("mlp", hidden)
        self.gate = ExpertProjection(num, embed, mlp, std=width**-0.5, rngs=rngs)
        self.up = ExpertProjection(num, embed, mlp, std=width**-0.5, rngs=rngs)
        self.down = ExpertProjection(num, mlp, embed, std=out_std, rngs=rngs)

    @property
    def weights(self) -> ExpertWeights:
        return ExpertWeights(self.gate.matrices, self.up.matrices, self.down.matrices)
