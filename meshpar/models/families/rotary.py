"""Rotary positions with the scalings that published models have.

Shapes: B batch, S seq, H heads, h head_dim, p pairs of a head.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.models.families.options import Rope
from meshpar.parallel.precision import wide

Angles = tuple[jax.Array, jax.Array]
"""Cosines and sines [B, S, 1, p]."""


def angles(rope: Rope, positions_BS: jax.Array, longest: jax.Array, dtype: Any) -> Angles:
    """The rotation of each token, in float32 at least.

    Args:
      longest: tokens of the longest row, by which `dynamic` and `longrope` choose frequencies, as in transformers.
    """
    pairs = wide(jnp.zeros((), dtype)).dtype
    frequencies, factor = _frequencies(rope, longest, pairs)
    angle = positions_BS[..., None, None].astype(pairs) * frequencies
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotated(rope: Rope, x_BSHh: jax.Array, by: Angles) -> jax.Array:
    """Rotates the first elements of each head; the others are unchanged."""
    cos, sin = by
    x, rest = x_BSHh[..., : rope.dim], x_BSHh[..., rope.dim :]
    if rope.is_interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = jnp.split(x, 2, axis=-1)
    first, second = wide(first), wide(second)
    turned = [first * cos - second * sin, second * cos + first * sin]
    if rope.is_interleaved and not rope.is_unzipped:
        out = jnp.stack(turned, axis=-1).reshape(x.shape)
    else:
        out = jnp.concatenate(turned, axis=-1)
    return jnp.concatenate([out.astype(x.dtype), rest], axis=-1)


def _frequencies(rope: Rope, length: jax.Array, dtype: Any) -> tuple[jax.Array, Any]:
    """The frequency of each pair, and the factor of cosines and sines."""
    numbers: dict[str, Any] = dict(rope.numbers)
    powers = np.arange(0, rope.dim, 2) / rope.dim
    plain = rope.theta**-powers
    factor = numbers.get("factor", 1.0)
    if rope.kind == "linear":
        return jnp.asarray(plain / factor, dtype), 1.0
    if rope.kind == "llama3":
        return jnp.asarray(_llama3(plain, numbers), dtype), 1.0
    if rope.kind == "yarn":
        return jnp.asarray(_yarn(rope, plain, numbers), dtype), numbers["attention_factor"]
    if rope.kind == "dynamic":
        longest = jnp.maximum(length, rope.limit).astype(dtype)
        base = rope.theta * (factor * longest / rope.limit - (factor - 1)) ** (rope.dim / (rope.dim - 2))
        return base ** jnp.asarray(-powers, dtype), 1.0
    if rope.kind == "longrope":
        short, long = (jnp.asarray(plain / np.array(numbers[f"{name}_factor"]), dtype) for name in ("short", "long"))
        is_long = length > rope.limit
        attention = numbers["attention_factor"]
        if "long_mscale" in numbers:  # phimoe: the factors of cosines depend on the length, the frequencies do not
            return short, jnp.where(is_long, numbers["long_mscale"], numbers["short_mscale"]).astype(dtype)
        return jnp.where(is_long, long, short), attention
    return jnp.asarray(plain, dtype), 1.0


def _llama3(plain: np.ndarray, numbers: dict[str, Any]) -> np.ndarray:
    """Divides low frequencies, and interpolates to high ones. Source: arXiv:2407.21783."""
    low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
    turns = numbers["original_max_position_embeddings"] * plain / (2 * math.pi)
    unscaled = np.clip((turns - low) / (high - low), 0, 1)
    return plain * (unscaled + (1 - unscaled) / numbers["factor"])


def _yarn(rope: Rope, plain: np.ndarray, numbers: dict[str, Any]) -> np.ndarray:
    """Divides the frequencies of pairs that turn less than `beta_slow` times. Source: arXiv:2309.00071."""
    length = numbers["original_max_position_embeddings"]

    def pair(turns: float) -> float:
        return rope.dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(numbers["beta_fast"]), pair(numbers["beta_slow"])
    if numbers["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    ramp = np.clip((np.arange(rope.dim // 2) - first) / (last - first or 0.001), 0, 1)
    return plain / numbers["factor"] * ramp + plain * (1 - ramp)
