"""Stochastic rounding of bfloat16 parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

_SALT = 0x726E64
"""Makes the random bits differ from those of other uses of the seed."""
_DROPPED_BITS = 16
"""Bits of a float32 that a bfloat16 does not have."""


def stochastic_round(x: Float[Array, "*dims"], key: PRNGKeyArray) -> Float[Array, "*dims"]:
    """Rounds to one of the two nearest bfloat16 numbers, with probabilities that make the mean equal to x.

    It adds random bits below the last bit of a bfloat16, and then drops the bits below that bit. The random bits of an
    element are a hash of the key and of its position, so they do not depend on how x is sharded.

    Args:
      x: any shape; rounded to float32 first, to nearest.

    Returns:
      bfloat16 of the same shape. Numbers that are not finite remain.

    Numerics: the error is at most one bfloat16 step, its mean zero, its variance `f(1 - f)` steps^2, where f is the
      distance of x to the lower number in steps.
    Communication: none.
    Source: Gupta et al. 2015, arXiv:1502.02551.

    >>> rounded = stochastic_round(jnp.full(10_000, 1 + 1 / 512), jax.random.key(0))  # a quarter of a step above 1
    >>> print(round(float(rounded.astype(jnp.float32).mean()), 3), jnp.unique(rounded))
    1.002 [1 1.00781]
    """
    narrow = x.astype(jnp.float32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(narrow, jnp.uint32) + noise
    kept = (bits >> _DROPPED_BITS).astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(kept, jnp.bfloat16)
    return jnp.where(jnp.isfinite(narrow), rounded, narrow.astype(jnp.bfloat16))


def with_stochastic_rounding(
    tx: optax.GradientTransformation, dtype: Any, seed: int
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer of bfloat16 parameters: it computes in `dtype`, and rounds the new parameters at random.

    Rounding to nearest loses an update below 1/512 of a parameter, so training stalls. With stochastic rounding the
    parameters change by the update on average. The random bits are a function of seed, step and parameter.

    Args:
      dtype: of the moments and of the new parameters before they are rounded.

    Returns:
      An optimizer whose update needs the keyword `step`, int32[], the number of the step.

    Memory: that of `tx`, with moments in `dtype`, and no copy of the parameters; see `with_master`.
    Communication: none.
    Source: Zamirai et al. 2020, arXiv:2010.06192.
    """
    inner = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        return tx.init(_cast(params, dtype))

    def update(grads: Any, state: Any, params: Any = None, *, step: jax.Array, **extra: Any) -> tuple[Any, Any]:
        wide = _cast(params, dtype)
        updates, state = inner.update(grads, state, wide, step=step, **extra)
        new, tree = jax.tree.flatten(optax.apply_updates(wide, updates))
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _SALT), step)
        rounded = [stochastic_round(x, jax.random.fold_in(key, number)) for number, x in enumerate(new)]
        changes = jax.tree.map(lambda x, old: x.astype(dtype) - old, tree.unflatten(rounded), wide)
        return changes, state

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore


def _cast(params: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype), params)
