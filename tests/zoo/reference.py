"""What a model of the zoo computes under plain JAX and Flax on one device: the user's own program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax import nnx

from tests.zoo import Init, Zoo


@dataclass(frozen=True)
class Reference:
    """The arrays of one step, on the host."""

    loss: Any
    grads: Any
    metrics: Any
    carried: Any


def first(init: Init | None, key: jax.Array) -> Any:
    """The arrays that an init returns, without Linen's boxes."""
    with nnx.use_eager_sharding(False):
        return nn.meta.unbox(jax.jit(init)(key)) if init else {}


def moved(arrays: Any) -> Any:
    """Adds a little to each float: the zeros and ones of an init hide errors, and make gradients zero."""
    rng = np.random.default_rng(0)

    def further(x: Any) -> Any:
        return x + 0.05 * rng.normal(size=x.shape) if jax.numpy.issubdtype(x.dtype, np.floating) else x

    return jax.tree.map(further, arrays)


def reference(
    zoo: Zoo, params: Any, batch: Mapping[str, np.ndarray], key: jax.Array | None = None, carried: Any = None
) -> Reference:
    """The loss and its gradients by `jax.jit(jax.value_and_grad(loss))`.

    Args:
      key: what the loss draws from; None if it draws nothing.
      carried: the state that the forward changes, with its random keys as JAX's.
    """

    def loss(params: Any, *others: Any) -> tuple[jax.Array, tuple[Any, Any]]:
        result = zoo.loss(params, *jax.tree.map(lambda x: x, others))  # NNX changes variables of this trace only
        mean, metrics, new = (*result, {}, {})[:3] if isinstance(result, tuple) else (result, {}, {})
        return mean, (metrics, new)

    others = (dict(batch), key, *([carried] if zoo.carried else []))
    (mean, (metrics, new)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, *others)
    return jax.device_get(Reference(mean, grads, metrics, without_keys(new)))


def without_keys(tree: Any) -> Any:
    """Random keys as the integers that they consist of."""
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree
    )


jax.tree_util.register_dataclass(Reference, ["loss", "grads", "metrics", "carried"], [])
