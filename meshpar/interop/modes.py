"""The arguments of a Flax model's call that say whether it trains."""

from __future__ import annotations

from inspect import signature
from typing import Any

IF_TRAINING = {
    "train": True, "training": True, "is_training": True, "deterministic": False, "use_running_average": False,
}  # fmt: skip
"""Parameter of a model's call that says whether it trains -> its value in a training; the opposite in an evaluation."""


def mode(module: Any, is_training: bool) -> dict[str, Any]:
    """The arguments of `IF_TRAINING` that the call of a module has.

    >>> import flax.linen as nn
    >>> mode(nn.Dropout(0.1), is_training=True)
    {'deterministic': False}
    """
    parameters = signature(type(module).__call__).parameters
    return {name: value == is_training for name, value in IF_TRAINING.items() if name in parameters}
