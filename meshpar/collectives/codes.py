"""Three codes of a block: 8-bit integers, 8-bit floats, signs."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives.compress import Blocks

FLOAT8 = jnp.float8_e4m3fn


class Int8(Blocks):
    """Integers from -127 to 127, times the scale: a block's largest magnitude over 127.

    Numerics: an element is off by half a scale at most, by a whole one under stochastic rounding.
    """

    kind: Literal["int8"] = "int8"

    @property
    def code_bytes(self) -> int:
        return self.block

    def encode(self, x, key):
        steps, scale = _scaled(x, 127.0)
        if self.rounding == "nearest":
            whole = jnp.round(steps)
        else:
            whole = jnp.floor(steps + jax.random.uniform(_needed(key), x.shape, x.dtype))
        return lax.bitcast_convert_type(jnp.clip(whole, -127, 127).astype(jnp.int8), jnp.uint8), scale

    def decode(self, code, scale):
        return lax.bitcast_convert_type(code, jnp.int8).astype(jnp.float32) * scale


class Float8(Blocks):
    """e4m3 floats times the scale: a block's largest magnitude over 448. Finer than integers for what is small.

    Numerics: an element is off by 1/16 of itself at most, by 1/8 under stochastic rounding, where it is not tiny.
    """

    kind: Literal["fp8"] = "fp8"

    @property
    def code_bytes(self) -> int:
        return self.block

    def encode(self, x, key):
        steps, scale = _scaled(x, 448.0)
        if self.rounding == "stochastic":
            steps = _to_three_bits(steps, _needed(key))
        return lax.bitcast_convert_type(jnp.clip(steps, -448, 448).astype(FLOAT8), jnp.uint8), scale

    def decode(self, code, scale):
        return lax.bitcast_convert_type(code, FLOAT8).astype(jnp.float32) * scale


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


def _scaled(x: jax.Array, largest: float) -> tuple[jax.Array, jax.Array]:
    """Each block over its scale. What is not finite stays so: the scale is not, and all that is decoded with it."""
    scale = jnp.abs(x).max(-1, keepdims=True) / largest
    return jnp.where(scale > 0, x / scale, jnp.zeros_like(x)), scale


def _to_three_bits(x: jax.Array, key: jax.Array) -> jax.Array:
    """Rounds the mantissa to 3 bits by chance: adds less than its last place, and cuts off what lies below."""
    below = jnp.uint32((1 << 20) - 1)
    bits = lax.bitcast_convert_type(x, jnp.uint32) + (jax.random.bits(key, x.shape, jnp.uint32) & below)
    return lax.bitcast_convert_type(bits & ~below, jnp.float32)


def _needed(key: jax.Array | None) -> jax.Array:
    if key is None:
        raise TypeError("stochastic rounding needs a key")
    return key
