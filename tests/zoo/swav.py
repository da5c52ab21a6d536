"""Self-supervision over all rows, in plain JAX: SwAV's balanced codes, a queue, and whitened features."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tests.zoo import Zoo
from tests.zoo.parts import ROWS

PIXELS = 32
FEATURES = 16
PROTOTYPES = 8
QUEUE = 16


def init(key):
    keys = jax.random.split(key, 4)
    shapes = {"w1": (PIXELS, 64), "w2": (64, FEATURES), "prototypes": (FEATURES, PROTOTYPES)}
    return {name: jax.random.normal(k, s) / s[0] ** 0.5 for k, (name, s) in zip(keys, shapes.items(), strict=False)}


def normalized(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def sinkhorn(scores, num_iters=3, epsilon=0.5):
    """Codes that use each prototype equally, over all rows."""
    q = jnp.exp((scores - scores.max()) / epsilon).T
    q = q / q.sum()

    def balance(_, q):
        q = q / q.sum(axis=1, keepdims=True) / q.shape[0]
        return q / q.sum(axis=0, keepdims=True) / q.shape[1]

    q = jax.lax.fori_loop(0, num_iters, balance, q)
    return (q / q.sum(axis=0, keepdims=True)).T


def whitening_loss(z):
    """The distance of the features' covariance from the identity, as the divergence of two Gaussians."""
    centred = z - z.mean(axis=0)
    covariance = centred.T @ centred / z.shape[0] + 0.1 * jnp.eye(z.shape[1])
    _, logdet = jnp.linalg.slogdet(covariance)
    return (jnp.trace(covariance) - logdet) / z.shape[1]


def loss(params, batch, key, carried):
    views = jnp.concatenate([batch["view1"], batch["view2"]])
    z = normalized(jax.nn.relu(views @ params["w1"]) @ params["w2"])
    scores = z @ normalized(params["prototypes"].T).T
    first, second = jnp.split(scores, 2)
    queued = carried["queue"] @ params["prototypes"]

    def codes(scores):
        with_queue = jax.lax.stop_gradient(jnp.concatenate([scores, queued]))
        return sinkhorn(with_queue)[: scores.shape[0]]

    def swapped(scores, codes):
        return -jnp.mean(jnp.sum(codes * jax.nn.log_softmax(scores / 0.1), axis=1))

    total = swapped(first, codes(second)) + swapped(second, codes(first)) + 0.1 * whitening_loss(z)
    newest = jax.lax.stop_gradient(z[: QUEUE // 4])
    queue = jax.lax.cond(
        carried["place"] >= 0,
        lambda queue: jax.lax.dynamic_update_slice(queue, newest, (carried["place"] % QUEUE, jnp.int32(0))),
        lambda queue: queue,
        carried["queue"],
    )
    return total, {"score": scores.max(axis=1).mean()}, {"queue": queue, "place": carried["place"] + QUEUE // 4}


def carried(key):
    return {"queue": normalized(jax.random.normal(key, (QUEUE, FEATURES))), "place": jnp.int32(0)}


def build() -> Zoo:
    rng = np.random.default_rng(0)
    image = rng.normal(size=(ROWS, PIXELS))
    batch = {name: image + 0.3 * rng.normal(size=image.shape) for name in ("view1", "view2")}
    dims = {"w1": ("embed", "mlp"), "w2": ("mlp", "embed"), "prototypes": ("embed", "vocab")}
    return Zoo("swav", init, loss, batch, carried=carried, dims=dims, rules={"unnamed": ()})
