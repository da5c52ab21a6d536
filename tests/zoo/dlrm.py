"""A DLRM in plain JAX: bags of categories by `segment_sum`, products of all pairs of features, clicks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tests.zoo import Zoo
from tests.zoo.parts import ROWS

DENSE = 8
FEATURES = 16
TABLES = (32, 48)
BAG = 4
WIDTHS = {"bottom": (DENSE, 32, FEATURES), "top": (FEATURES + (len(TABLES) + 1) * len(TABLES) // 2 + 5, 32, 1)}


def init(key):
    def mlp(key, sizes):
        keys = jax.random.split(key, len(sizes) - 1)
        return [
            {"w": jax.random.normal(key, (m, n)) * (2 / (m + n)) ** 0.5, "b": jnp.zeros(n)}
            for key, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
        ]

    bottom, top, tables = jax.random.split(key, 3)
    keys = jax.random.split(tables, len(TABLES))
    return {
        "bottom": mlp(bottom, WIDTHS["bottom"]),
        "top": mlp(top, WIDTHS["top"]),
        "tables": [
            jax.random.normal(key, (rows, FEATURES)) / rows**0.5 for key, rows in zip(keys, TABLES, strict=True)
        ],
    }


def apply_mlp(layers, x):
    *hidden, last = layers
    for layer in hidden:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def embedding_bag(table, ids, weights):
    """The weighted sum of the rows of a bag, as on a list of all ids with the bag of each."""
    num_bags, size = ids.shape
    bags = jnp.repeat(jnp.arange(num_bags), size)
    rows = jnp.take(table, ids.reshape(-1), axis=0) * weights.reshape(-1, 1)
    return jax.ops.segment_sum(rows, bags, num_segments=num_bags, indices_are_sorted=True)


def interact(dense, bags):
    """The products of all pairs of features, below the diagonal, beside the dense features."""
    features = jnp.stack([dense, *bags], axis=1)
    products = jnp.einsum("bif,bjf->bij", features, features)
    rows, columns = np.tril_indices(features.shape[1], k=-1)
    pairs = products[:, rows, columns]
    return jnp.concatenate([dense, pairs, jnp.zeros((len(dense), 5), dense.dtype)], axis=1)  # padded to a good size


def forward(params, batch):
    dense = jax.nn.relu(apply_mlp(params["bottom"], batch["dense"]))
    bags = [
        embedding_bag(table, batch["ids"][:, i], batch["weights"][:, i]) for i, table in enumerate(params["tables"])
    ]
    return apply_mlp(params["top"], interact(dense, bags))[:, 0]


def loss(params, batch, key):
    logits = forward(params, batch)
    labels = batch["clicked"].astype(logits.dtype)
    losses = jnp.maximum(logits, 0) - logits * labels + jnp.log1p(jnp.exp(-jnp.abs(logits)))
    return losses.mean(), {"accuracy": ((logits > 0) == batch["clicked"]).astype(logits.dtype).mean()}


def build() -> Zoo:
    rng = np.random.default_rng(0)
    batch = {
        "dense": rng.normal(size=(ROWS, DENSE)),
        "ids": np.stack([rng.integers(0, rows, (ROWS, BAG), np.int32) for rows in TABLES], axis=1),
        "weights": rng.random((ROWS, len(TABLES), BAG)),
        "clicked": rng.integers(0, 2, ROWS, np.int32),
    }
    dims = {
        "tables.*": ("vocab", "embed"),
        "bottom.0.w": ("embed", "mlp"),
        "bottom.1.w": ("mlp", "embed"),
        "top.0.w": ("embed", "mlp"),
        "top.1.w": ("mlp", "unnamed"),
        "*.0.b": ("mlp",),
        "bottom.1.b": ("embed",),
    }
    return Zoo("dlrm", init, loss, batch, dims=dims, rules={"unnamed": ()})
