"""The optimizers that a config can name; what they have in common is in `descent`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import optax
import pydantic

from meshpar.train.adafactor import Adafactor
from meshpar.train.descent import Beta, Descent, NonNegative, Positive
from meshpar.train.muon import Muon


class AdamW(Descent):
    """Source: Loshchilov and Hutter 2019, arXiv:1711.05101. Memory: two moments a parameter."""

    kind: Literal["adamw"] = "adamw"
    b1: Beta = 0.9
    """Decay of the mean of gradients."""
    b2: Beta = 0.95
    """Decay of the mean of their squares."""
    eps: Positive = 1e-8

    def direction(self, dims: Any) -> optax.GradientTransformation:
        return optax.scale_by_adam(self.b1, self.b2, self.eps)


class Lion(Descent):
    """The sign of an average. Source: Chen et al. 2023, arXiv:2302.06675. Memory: one moment a parameter.

    >>> import jax.numpy as jnp
    >>> tx = Lion(lr=0.5, weight_decay=0).build(10, {"w": ("embed", "mlp")})
    >>> params = {"w": jnp.ones((1, 2))}
    >>> updates, _ = tx.update({"w": jnp.array([[3.0, -4.0]])}, tx.init(params), params)
    >>> print(updates["w"])
    [[-0.5  0.5]]
    """

    kind: Literal["lion"] = "lion"
    b1: Beta = 0.9
    """Share of the past in the direction."""
    b2: Beta = 0.99
    """Share of the past in the moment."""

    def direction(self, dims: Any) -> optax.GradientTransformation:
        return optax.scale_by_lion(self.b1, self.b2)


class SGD(Descent):
    """Stochastic gradient descent. Memory: one moment a parameter; none without momentum."""

    kind: Literal["sgd"] = "sgd"
    weight_decay: NonNegative = 0.0
    momentum: Beta = 0.9
    nesterov: bool = False

    def direction(self, dims: Any) -> optax.GradientTransformation:
        return optax.trace(self.momentum, self.nesterov) if self.momentum else optax.identity()


Optimizer = Annotated[AdamW | Lion | SGD | Adafactor | Muon, pydantic.Field(discriminator="kind")]
