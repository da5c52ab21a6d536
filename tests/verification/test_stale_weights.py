"""PipeDream-2BW is verified against one device that computes its gradients at stale weights too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from meshpar import MeshLayout, Parallel, Training, training, verify
from meshpar.train.stale_weights import StaleWeights

WIDTH = 8
PIPELINE = {"kind": "pipedream_2bw", "num_microbatches": 2}


def init(key):
    return {"w": jax.random.normal(key, (4, WIDTH, WIDTH)) / 2, "head": jnp.ones((WIDTH,))}


def loss(params, batch, key, carried):
    """It counts its calls, and weighs its error by them."""
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params["w"])
    error = jnp.square(x @ params["head"] - batch["y"]).mean()
    return error / (1 + carried["calls"]), {}, {"calls": carried["calls"] + 1}


def verified():
    rng = np.random.default_rng(0)
    batches = [
        {"x": rng.normal(size=(8, WIDTH)).astype(np.float32), "y": rng.normal(size=8).astype(np.float32)}
        for _ in range(4)
    ]
    subject = training(
        init, loss, optax.adam(1e-2), batches[0], mesh=MeshLayout(pipe=2).build(jax.devices()[:2]),
        rules={"preset": "pipeline", "unnamed": []}, dims={"w": ("layers", "embed", None), "head": ("embed",)},
        carried=lambda key: {"calls": jnp.zeros(())}, parallel=Parallel(pipeline=PIPELINE),
    )  # fmt: skip
    return verify(subject, batches)


def test_stale_weights_and_a_state_of_the_model_are_equal_to_one_device():
    assert verified().is_equal


class FreshWeights(StaleWeights):
    def gradients(self, gradients):
        at_stale = super().gradients(gradients)
        return lambda params, batch, step, carried: at_stale(params, batch, step, carried | {"stale": params})


def test_planted_fresh_weights_on_the_mesh_are_seen(monkeypatch):
    right = Training.strategies.func
    wrong = property(lambda self: (FreshWeights(),) if self.mesh.size > 1 else right(self))
    monkeypatch.setattr(Training, "strategies", wrong)
    assert not verified().is_equal
