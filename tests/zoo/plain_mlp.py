"""An MLP of plain arrays, as in JAX's own tutorial."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tests.zoo import Zoo
from tests.zoo.parts import ROWS

SIZES = (32, 64, 32, 16)


def init(key):
    keys = jax.random.split(key, len(SIZES) - 1)
    return [
        {"w": jax.random.normal(key, (m, n)) / m**0.5, "b": jnp.zeros(n)}
        for key, m, n in zip(keys, SIZES[:-1], SIZES[1:], strict=True)
    ]


def predict(params, x):
    *hidden, last = params
    for layer in hidden:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def loss(params, batch, key):
    return jnp.mean(jnp.square(predict(params, batch["x"]) - batch["y"]))


def build() -> Zoo:
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(ROWS, SIZES[0])), "y": rng.normal(size=(ROWS, SIZES[-1]))}
    dims = {
        "0.w": ("embed", "mlp"),
        "0.b": ("mlp",),
        "1.w": ("mlp", "embed"),
        "1.b": ("embed",),
        "2.w": ("embed", "outputs"),
        "2.b": ("outputs",),
    }
    return Zoo("plain_mlp", init, loss, batch, dims=dims, rules={"outputs": ()})
