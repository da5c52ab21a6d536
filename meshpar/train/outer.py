"""The end of a round: the outer optimizer moves the shared parameters."""

from __future__ import annotations

from typing import Any

import jax
import optax


def outer_step(tx: optax.GradientTransformation, means: Any, opt_state: Any, shared: Any) -> tuple[Any, Any]:
    """The next shared parameters and the next state of their optimizer.

    Args:
      means: the mean of `shared - own` over those that trained alone, which is the gradient of the outer optimizer.
    """
    with jax.numpy_dtype_promotion("standard"):  # Optax mixes floats with integer step counts
        updates, opt_state = tx.update(means, opt_state, shared)
        return optax.apply_updates(shared, updates), opt_state
