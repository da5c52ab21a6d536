"""AdamW with clipping by the global norm, on local shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

CLIP_NORM = 1.0
B1 = 0.9
B2 = 0.95
EPS = 1e-8
WEIGHT_DECAY = 0.1


def init(params: Any) -> dict[str, Any]:
    """The state: parameters, both moments, and the number of updates."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {"params": params, "mean": zeros, "square": jax.tree.map(jnp.copy, zeros), "step": jnp.int32(0)}


def update(state: dict[str, Any], grads: Any, norm: jax.Array, learning_rate: Callable[[Any], Any]) -> dict[str, Any]:
    """The next state. Norms are not decayed.

    Args:
      norm: of the whole gradient.
    """
    step = state["step"] + 1
    clip = jnp.minimum(1.0, CLIP_NORM / norm)
    rate = learning_rate(state["step"])
    mean_scale = 1 / (1 - B1**step)
    square_scale = 1 / (1 - B2**step)

    def one(path: Any, p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        g = g * clip
        m = B1 * m + (1 - B1) * g
        v = B2 * v + (1 - B2) * g * g
        direction = m * mean_scale / (jnp.sqrt(v * square_scale) + EPS)
        decay = WEIGHT_DECAY * p if "norm" not in path[-1].key else 0.0
        return p - rate * (direction + decay), m, v

    new = jax.tree.map_with_path(one, state["params"], state["mean"], state["square"], grads)
    params, mean, square = jax.tree.transpose(jax.tree.structure(grads), None, new)
    return {"params": params, "mean": mean, "square": square, "step": step}
