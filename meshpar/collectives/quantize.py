"""Three formats of compressed blocks: 8-bit integers, 8-bit floats, and signs."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jax import lax

from meshpar.collectives import codec
from meshpar.collectives.compression import Blocks


class Scaled(Blocks):
    """Base of the 8-bit formats. A block is divided by its scale: its largest magnitude over that of the dtype."""

    dtype: ClassVar[Any]

    def encode(self, x, key):
        if self.rounding == "stochastic" and key is None:
            raise TypeError("stochastic rounding needs a key")
        scale = jnp.abs(x).max(-1, keepdims=True) / codec.largest_code(self.dtype)
        codes = codec.encode(x, scale, self.dtype, key=key if self.rounding == "stochastic" else None)
        return lax.bitcast_convert_type(codes, jnp.uint8), scale

    def decode(self, code, scale):
        return codec.decode(lax.bitcast_convert_type(code, self.dtype), scale)


class Int8(Scaled):
    """Integers from -127 to 127.

    Numerics: an element is off by at most half a scale, or by a whole one under stochastic rounding.
    """

    kind: Literal["int8"] = "int8"
    dtype: ClassVar = jnp.int8


class Float8(Scaled):
    """e4m3 floats, up to 448: more precise than integers for small elements.

    Numerics: an element is off by at most 1/16 of itself, or by 1/8 under stochastic rounding, unless it is tiny.
    """

    kind: Literal["fp8"] = "fp8"
    dtype: ClassVar = jnp.float8_e4m3fn


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
