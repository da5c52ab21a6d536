"""Rotary positions: each pair of a head's elements turns with the position, at a frequency of its own.

Shapes: B batch, S seq, H heads, h head_dim, p pairs of a head that turn.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import jax.numpy as jnp
import pydantic
from jaxtyping import Array, Float, Int

from meshpar.config import Config, Positive
from meshpar.parallel.precision import wide

Factor = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
Rotation = tuple[Float[Array, "B S 1 p"], Float[Array, "B S 1 p"]]
"""Cosines and sines [batch, seq, 1, p] of the angles by which the pairs of a head are turned."""


class Interpolated(Config):
    """Every frequency divided by `factor`: positions so much closer. Source: Chen et al. 2023, arXiv:2306.15595."""

    kind: Literal["linear"] = "linear"
    factor: Factor

    def __call__(self, frequencies_p: Float[Array, "p"]) -> Float[Array, "p"]:
        return frequencies_p / self.factor


class Llama3(Config):
    """Low frequencies divided by `factor`, high ones kept, those between mixed.

    Source: Grattafiori et al. 2024, arXiv:2407.21783, as in Llama 3.1.
    """

    kind: Literal["llama3"] = "llama3"
    factor: Factor
    low_freq_factor: Factor
    """Low is what turns less often than this in `original_seq_len`."""
    high_freq_factor: Factor
    """High is what turns more often than this in `original_seq_len`."""
    original_seq_len: Positive
    """Tokens a row, before the model was made to read longer ones."""

    def __call__(self, frequencies_p: Float[Array, "p"]) -> Float[Array, "p"]:
        turns = self.original_seq_len * frequencies_p / (2 * math.pi)
        high = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = jnp.clip(high, 0.0, 1.0)
        return frequencies_p * (kept + (1.0 - kept) / self.factor)


Scaling = Annotated[Interpolated | Llama3, pydantic.Field(discriminator="kind")]


def rotation(
    positions_BS: Int[Array, "B S"], rotary_dim: int, theta: float, dtype: jnp.dtype, scaling: Scaling | None = None
) -> Rotation:
    """Rotary position embedding: pair i of p turns by position * theta^(-i/p), or as `scaling` says.

    All layers share it. Numerics: in float32 at least. Source: Su et al. 2021, arXiv:2104.09864.

    Args:
      rotary_dim: 2p, the elements of a head that are turned.
    """
    pair = wide(jnp.arange(rotary_dim // 2, dtype=dtype))
    frequencies = theta ** (-pair / (rotary_dim // 2))
    angle = positions_BS[..., None, None].astype(pair.dtype) * (scaling(frequencies) if scaling else frequencies)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BSHh: Float[Array, "B S H h"], by: Rotation) -> Float[Array, "B S H h"]:
    """Turns the pairs (i, i + p) of each head; what is beyond its first 2p elements stays."""
    cos, sin = by
    p = cos.shape[-1]
    first, second = wide(x_BSHh[..., :p]), wide(x_BSHh[..., p : 2 * p])
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x_BSHh.dtype), x_BSHh[..., 2 * p :]], axis=-1)
