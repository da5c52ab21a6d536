"""Applies experts to the tokens in their places, where experts may be sharded over devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from meshpar.mesh.varying import Axes
from meshpar.nn.experts.mlp import ExpertWeights


def of_places(weights: ExpertWeights, x_BEPD: Float[Array, "B E P D"], axes: Axes) -> Float[Array, "B E P D"]:
    """The results of all places: `x[B, E, P, D] -> x[B n, E_a, P, D] -> y[B n, E_a, P, D] -> y[B, E, P, D]`.

    Args:
      weights: of the experts on this device.
      axes: over which experts are sharded; empty if the device has all of them.

    Communication: two all-to-alls of x, each (n-1)/n of its bytes; backward two more.
    """
    if not axes:
        return weights.swiglu(x_BEPD, _dot)
    x_BEPD = lax.all_to_all(x_BEPD, axes, split_axis=1, concat_axis=0, tiled=True)
    y_BEPD = weights.swiglu(x_BEPD, _dot)
    return lax.all_to_all(y_BEPD, axes, split_axis=0, concat_axis=1, tiled=True)


def _dot(x_BEPI: jax.Array, w_EIO: jax.Array) -> jax.Array:
    return jnp.einsum("bepi,eio->bepo", x_BEPI, w_EIO)
