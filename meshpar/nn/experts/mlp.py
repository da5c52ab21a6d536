"""SwiGLU with the weights of several experts, for tokens that are sorted by expert, or that have places.

Shapes: N rows, E experts on this device, P places of an expert, D embed, M mlp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from meshpar.nn.layers import normal, silu_product
from meshpar.nn.low_rank import Adapter, LowRank
from meshpar.nn.remat import named
from meshpar.parallel.precision import wide_dtype

Dot = Callable[[jax.Array, jax.Array], jax.Array]
"""(rows, matrices [experts, in, out]) -> the product of each row with the matrix of its expert."""


class Matrices(NamedTuple):
    """A matrix of each expert on this device, and LoRA's update of it; of one expert, inside a loop over experts.

    Args:
      kernel: [experts, in, out].
      adapter: of matrices [experts, in, rank] and [experts, rank, out]; None without LoRA.
    """

    kernel: jax.Array
    adapter: Adapter | None = None

    def product(self, x: jax.Array, dot: Dot) -> jax.Array:
        y = dot(x, self.kernel)
        if self.adapter is None:
            return y
        return y + self.adapter.scaled(dot(dot(x, self.adapter.a), self.adapter.b))

    def gradients(self, x: Float[Array, "R I"], dy: Float[Array, "R O"]) -> tuple[Float[Array, "R I"], Matrices]:
        """The gradients of the rows of one expert and of its matrices.

        Numerics: the gradients of matrices are in float32 at least.
        """
        dx, dkernel = _gradients(x, self.kernel, dy)
        if self.adapter is None:
            return dx, Matrices(dkernel)
        dy = self.adapter.scaled(dy)
        dthin, db = _gradients(x @ self.adapter.a, self.adapter.b, dy)
        dx_of_thin, da = _gradients(x, self.adapter.a, dthin)
        return dx + dx_of_thin, Matrices(dkernel, replace(self.adapter, a=da, b=db))


def _gradients(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    dw = jnp.einsum("ri,ro->io", x, dy, preferred_element_type=wide_dtype(w.dtype))
    return jnp.einsum("ro,io->ri", dy, w), dw


class ExpertWeights(NamedTuple):
    """The matrices of the experts on this device: gate and up [experts, embed, mlp], down [experts, mlp, embed]."""

    gate: Matrices
    up: Matrices
    down: Matrices

    @property
    def num(self) -> int:
        """The number of experts on this device."""
        return len(self.gate.kernel)

    def swiglu(self, x: Float[Array, "*rows D"], dot: Dot) -> Float[Array, "*rows D"]:
        """The results of rows."""
        gate = named(self.gate.product(x, dot), "gate")
        up = named(self.up.product(x, dot), "up")
        return self.down.product(silu_product(gate, up), dot)


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
