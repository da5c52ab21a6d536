"""How a cache stores keys and values: in the dtype of the computation, or in 8 bits.

Shapes: K kv_heads, h head_dim.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshpar.collectives import codec

CacheFormat = Literal["int8"]


class Codes(NamedTuple):
    """Keys or values in 8 bits: `codes * scales[..., None]`.

    A scale is the largest magnitude of a token in a head over 127; each element has the nearest code.

    Args:
      codes: int8[..., kv_heads, head_dim].
      scales: float[..., kv_heads], in the dtype of the computation.
    """

    codes: Int[Array, "... K h"]
    scales: Float[Array, "... K"]

    @classmethod
    def of(cls, x: Float[Array, "*tokens K h"]) -> Codes:
        scales = jnp.abs(x).max(-1) / codec.largest_code(jnp.int8)
        return cls(codec.encode(x, scales[..., None]), scales)


Stored = Float[Array, "... K h"] | Codes
"""Keys or values in a cache."""


def encoded(x: Float[Array, "*tokens K h"], like: Stored) -> Stored:
    """Encodes new keys or values in the format and dtype of a cache, `like`."""
    return Codes.of(x.astype(like.scales.dtype)) if isinstance(like, Codes) else x.astype(like.dtype)


def decoded(stored: Stored) -> jax.Array:
    """The keys or values, float[..., kv_heads, head_dim]."""
    return codec.decode(stored.codes, stored.scales[..., None]) if isinstance(stored, Codes) else stored
