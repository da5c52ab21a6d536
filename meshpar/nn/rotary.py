"""Rotary positions: each pair of a head's elements is rotated by an angle that grows with the position.

Shapes: B batch, S seq, H heads, h head_dim, p pairs of a head that are rotated.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import pydantic
from jaxtyping import Array, Float, Int

from meshpar.config import Config, Positive
from meshpar.mesh.varying import varying_like
from meshpar.parallel.precision import wide

Factor = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
RopeAngles = tuple[Float[Array, "B S 1 p"], Float[Array, "B S 1 p"]]
"""Cosines and sines [batch, seq, 1, p] of the rotation angles of a head's pairs."""


class Interpolated(Config):
    """Divides every frequency by `factor`, as if positions were closer. Source: Chen et al. 2023, arXiv:2306.15595."""

    kind: Literal["linear"] = "linear"
    factor: Factor
    """The divisor of all frequencies."""

    def __call__(self, frequencies_p: Float[Array, "p"]) -> Float[Array, "p"]:
        return frequencies_p / self.factor


class Llama3(Config):
    """Divides low frequencies by `factor`, leaves high frequencies unchanged, and interpolates between.

    Source: Grattafiori et al. 2024, arXiv:2407.21783, as in Llama 3.1.
    """

    kind: Literal["llama3"] = "llama3"
    factor: Factor
    """The divisor of low frequencies."""
    low_freq_factor: Factor
    """Frequencies with fewer turns in `original_seq_len` tokens are low."""
    high_freq_factor: Factor
    """Frequencies with more turns in `original_seq_len` tokens are high."""
    original_seq_len: Positive
    """Tokens per row in pretraining."""

    def __call__(self, frequencies_p: Float[Array, "p"]) -> Float[Array, "p"]:
        turns = self.original_seq_len * frequencies_p / (2 * math.pi)
        high = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        unscaled = jnp.clip(high, 0.0, 1.0)
        return frequencies_p * (unscaled + (1.0 - unscaled) / self.factor)


Scaling = Annotated[Interpolated | Llama3, pydantic.Field(discriminator="kind")]


def rope_angles(
    positions_BS: Int[Array, "B S"], rotary_dim: int, theta: float, dtype: jnp.dtype, scaling: Scaling | None = None
) -> RopeAngles:
    """Computes the rotation of each token: pair i of p rotates by position * theta^(-i/p), or a scaled frequency.

    All layers share the result. Numerics: in float32 at least. Source: Su et al. 2021, arXiv:2104.09864.

    Args:
      rotary_dim: 2p, the number of elements of a head that are rotated.
    """
    pair = wide(jnp.arange(rotary_dim // 2, dtype=dtype))
    frequencies = theta ** (-pair / (rotary_dim // 2))
    angle = positions_BS[..., None, None].astype(pair.dtype) * (scaling(frequencies) if scaling else frequencies)
    # Without the barrier XLA would compute them again at each use, for each head.
    return jax.lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))


def apply_rope(x_BSHh: Float[Array, "B S H h"], rope: RopeAngles) -> Float[Array, "B S H h"]:
    """Rotates the pairs (i, i + p) of each head; elements after the first 2p are unchanged."""
    cos, sin = rope
    return _rotate(varying_like(x_BSHh, cos), cos, sin)


@jax.custom_vjp
def _rotate(x_BSHh: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    p = cos.shape[-1]
    first = wide(x_BSHh[..., :p])
    second = wide(x_BSHh[..., p : 2 * p])
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x_BSHh.dtype), x_BSHh[..., 2 * p :]], axis=-1)


def _rotate_back(rope: RopeAngles, grad_BSHh: jax.Array) -> tuple[jax.Array, None, None]:
    """The transpose of a rotation is its inverse. Autodiff would pad both halves of a head, and add them."""
    cos, sin = rope
    return _rotate(grad_BSHh, cos, -sin), None, None


_rotate.defvjp(lambda x, cos, sin: (_rotate(x, cos, sin), (cos, sin)), _rotate_back)
