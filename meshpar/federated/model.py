"""The models that clients train: classifiers of vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from meshpar.config import Coerced, Config, Positive, default


class Model(NamedTuple):
    """The model that a federation trains.

    Args:
      init: key -> parameters, a tree.
      losses: (parameters, x [B, ...], y int32 [B]) -> the loss of each example [B], and whether its class is predicted
        correctly, bool[B].
    """

    init: Callable[[jax.Array], Any]
    losses: Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class Classifier(Config):
    """A network of dense layers with ReLU; without hidden layers, softmax regression."""

    shorthand: ClassVar = "hidden"
    hidden: Coerced[tuple[Positive, ...], list[int]] = default(())
    """Widths of the hidden layers."""

    def build(self, num_features: int, num_classes: int, dtype: str) -> Model:
        network = _Network((*self.hidden, num_classes), dtype)
        return of_flax(network, jnp.zeros((1, num_features), dtype))


class _Network(nn.Module):
    widths: tuple[int, ...]
    dtype: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i, width in enumerate(self.widths):
            x = nn.Dense(width, param_dtype=self.dtype)(nn.relu(x) if i else x)
        return x


def of_flax(network: nn.Module, example: jax.Array) -> Model:
    """Makes a `Model` of a Flax Linen network that computes the logits of classes, [batch, classes].

    Args:
      example: [1, ...], an input.

    >>> model = of_flax(nn.Dense(3), jnp.zeros((1, 4)))
    >>> jax.eval_shape(model.init, jax.random.key(0))["kernel"].shape
    (4, 3)
    """

    def losses(params: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits: Any = network.apply({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y), logits.argmax(-1).astype(y.dtype) == y

    return Model(lambda key: network.init(key, example)["params"], losses)
