"""Three formats of compressed blocks: 8-bit integers, 8-bit floats, and signs."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives.compression import Blocks


class Scaled(Blocks):
    """Base of the 8-bit formats. A block is divided by its scale: its largest magnitude over that of the dtype."""

    dtype: ClassVar[Any]
    largest: ClassVar[int]

    def encode(self, x, key):
        # A scale that is not finite makes every element that is decoded with it not finite.
        scale = jnp.abs(x).max(-1, keepdims=True) / self.largest
        steps = jnp.where(scale > 0, x / scale, jnp.zeros_like(x))
        if self.rounding == "stochastic":
            if key is None:
                raise TypeError("stochastic rounding needs a key")
            steps = self.round_by_chance(steps, key)
        elif jnp.issubdtype(self.dtype, jnp.integer):
            steps = jnp.round(steps)
        code = jnp.clip(steps, -self.largest, self.largest).astype(self.dtype)
        return lax.bitcast_convert_type(code, jnp.uint8), scale

    def decode(self, code, scale):
        return lax.bitcast_convert_type(code, self.dtype).astype(jnp.float32) * scale

    def round_by_chance(self, x: jax.Array, key: jax.Array) -> jax.Array:
        """Rounds up or down at random, so that the mean is x."""
        raise NotImplementedError


class Int8(Scaled):
    """Integers from -127 to 127.

    Numerics: an element is off by at most half a scale, or by a whole one under stochastic rounding.
    """

    kind: Literal["int8"] = "int8"
    dtype: ClassVar = jnp.int8
    largest: ClassVar = 127

    def round_by_chance(self, x, key):
        return jnp.floor(x + jax.random.uniform(key, x.shape, x.dtype))


class Float8(Scaled):
    """e4m3 floats, up to 448: more precise than integers for small elements.

    Numerics: an element is off by at most 1/16 of itself, or by 1/8 under stochastic rounding, unless it is tiny.
    """

    kind: Literal["fp8"] = "fp8"
    dtype: ClassVar = jnp.float8_e4m3fn
    largest: ClassVar = 448

    def round_by_chance(self, x, key):
        # Rounds to 3 bits of mantissa: adds a random number below the last of them, and truncates the rest.
        below = jnp.uint32((1 << 20) - 1)
        bits = lax.bitcast_convert_type(x, jnp.uint32) + (jax.random.bits(key, x.shape, jnp.uint32) & below)
        return lax.bitcast_convert_type(bits & ~below, jnp.float32)


class OneBit(Blocks):
    """Signs, times the mean magnitude of the block.

    Source: Seide et al. 2014, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
    Training of Speech DNNs"; Tang et al. 2021, arXiv:2102.02888.
    """

    kind: Literal["onebit"] = "onebit"
    rounding: Literal["nearest"] = "nearest"
    error_feedback: bool = True

    @property
    def code_bytes(self) -> int:
        return self.block // 8

    def encode(self, x, key):
        return jnp.packbits(x >= 0, axis=-1), jnp.abs(x).mean(-1, keepdims=True)

    def decode(self, code, scale):
        return jnp.where(jnp.unpackbits(code, axis=-1).astype(bool), scale, -scale)
