"""Lion: updates by the sign of averaged gradients."""

from __future__ import annotations

from typing import Any, Literal

import optax

from meshpar.optim.base import Beta, Descent


class Lion(Descent):
    """Updates by the sign of averaged gradients.

    Source: Chen et al. 2023, arXiv:2302.06675. Memory: one moment per parameter.

    >>> import jax.numpy as jnp
    >>> tx = Lion(lr=0.5, weight_decay=0).build(10, {"w": ("embed", "mlp")})
    >>> params = {"w": jnp.ones((1, 2))}
    >>> updates, _ = tx.update({"w": jnp.array([[3.0, -4.0]])}, tx.init(params), params)
    >>> print(updates["w"])
    [[-0.5  0.5]]
    """

    kind: Literal["lion"] = "lion"
    b1: Beta = 0.9
    """Weight of past gradients in the direction."""
    b2: Beta = 0.99
    """Weight of past gradients in the moment."""

    def direction(self, dims: Any) -> optax.GradientTransformation:
        return optax.scale_by_lion(self.b1, self.b2)
