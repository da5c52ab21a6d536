"""AdamW."""

from __future__ import annotations

from typing import Any, Literal

import optax

from meshpar.optim.base import Beta, Descent, Positive


class AdamW(Descent):
    """Adam with decoupled weight decay.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101. Memory: two moments a parameter.
    """

    kind: Literal["adamw"] = "adamw"
    b1: Beta = 0.9
    """Decay of the mean of the gradients."""
    b2: Beta = 0.95
    """Decay of the mean of the squared gradients."""
    eps: Positive = 1e-8
    """Added to the root of the mean squared gradient, which divides the update."""

    def direction(self, dims: Any) -> optax.GradientTransformation:
        return optax.scale_by_adam(self.b1, self.b2, self.eps)
