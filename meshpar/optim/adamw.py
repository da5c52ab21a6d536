"""AdamW: Adam with decoupled weight decay."""

from __future__ import annotations

from typing import Any, Literal

import optax

from meshpar.optim.base import Beta, Descent, Positive


class AdamW(Descent):
    """Adam with decoupled weight decay.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101. Memory: two moments per parameter.

    >>> import jax, jax.numpy as jnp
    >>> tx = AdamW(lr=0.5, weight_decay=0).build(10, {"w": ("embed", "mlp")})
    >>> params = {"w": jnp.ones((1, 2))}
    >>> with jax.numpy_dtype_promotion("standard"):  # Optax mixes floats with integer step counts
    ...     updates, _ = tx.update({"w": jnp.array([[3.0, -4.0]])}, tx.init(params), params)
    >>> print(updates["w"].round(3))  # the first update is as large as the learning rate
    [[-0.5  0.5]]
    """

    kind: Literal["adamw"] = "adamw"
    b1: Beta = 0.9
    """Decay of the mean of the gradients."""
    b2: Beta = 0.95
    """Decay of the mean of the squared gradients."""
    eps: Positive = 1e-8
    """Added to the root of the mean squared gradient."""

    def direction(self, dims: Any) -> optax.GradientTransformation:
        return optax.scale_by_adam(self.b1, self.b2, self.eps)
