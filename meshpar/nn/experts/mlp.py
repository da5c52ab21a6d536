"""SwiGLU with the weights of several experts, for tokens that are sorted by expert, or that have places.

Shapes: N rows, E experts on this device, P places of an expert, D embed, M mlp.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshpar.nn.experts.grouped import grouped_dot
from meshpar.nn.layers import silu_product
from meshpar.nn.remat import named


class ExpertWeights(NamedTuple):
    """The matrices of the experts on this device: gate and up [experts, embed, mlp], down [experts, mlp, embed]."""

    gate: jax.Array
    up: jax.Array
    down: jax.Array

    def of_sorted(self, x_ND: Float[Array, "N D"], sizes_E: Int[Array, "E"], expected: int) -> Float[Array, "N D"]:
        """The results of rows that are sorted by expert; 0 for rows beyond the last expert's.

        Args:
          sizes_E: int32, the number of rows of each expert.
          expected: their sum, if the router is balanced.
        """
        gate = named(grouped_dot(x_ND, self.gate, sizes_E, expected), "gate")
        up = named(grouped_dot(x_ND, self.up, sizes_E, expected), "up")
        return grouped_dot(silu_product(gate, up), self.down, sizes_E, expected)

    def of_places(self, x_BEPD: Float[Array, "B E P D"]) -> Float[Array, "B E P D"]:
        """The results of rows in places of experts."""
        gate = named(jnp.einsum("bepd,edm->bepm", x_BEPD, self.gate), "gate")
        up = named(jnp.einsum("bepd,edm->bepm", x_BEPD, self.up), "up")
        return jnp.einsum("bepm,emd->bepd", silu_product(gate, up), self.down)
