"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Any, Literal

import optax

from meshpar.optim.base import Beta, Descent, NonNegative


class SGD(Descent):
    """Stochastic gradient descent. Memory: one moment per parameter, or none without momentum."""

    kind: Literal["sgd"] = "sgd"
    weight_decay: NonNegative = 0.0
    momentum: Beta = 0.9
    """Decay of the sum of the gradients; 0 for none."""
    nesterov: bool = False
    """Whether the update uses Nesterov's momentum."""

    def direction(self, dims: Any) -> optax.GradientTransformation:
        return optax.trace(self.momentum, self.nesterov) if self.momentum else optax.identity()
