"""LoRA's updates and the norms of DoRA are made one layer at a time, in the loop over layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar import inspect, training
from meshpar.partition import loss as partitioned_loss
from meshpar.verification.trial import QUICK

LAYERS, WIDTH, HIDDEN, RANK, ROWS, RATE = 8, 64, 256, 2, 8, 0.1
DIMS = {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed")}
BATCH = {"x": np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")}


def init(key):
    keys = jax.random.split(key)
    return {
        "up": jax.random.normal(keys[0], (LAYERS, WIDTH, HIDDEN)) / WIDTH**0.5,
        "down": jax.random.normal(keys[1], (LAYERS, HIDDEN, WIDTH)) / HIDDEN**0.5,
    }


def loss(params, batch, key):
    def layer(x, kernels):
        return x + jnp.tanh(x @ kernels["up"]) @ kernels["down"], None

    return jnp.square(jax.lax.scan(layer, batch["x"], params)[0]).mean()


def by_hand(params, num_steps):
    """`params` has a tree `lora`, of which alone there are gradients. `alpha / rank` is 2."""

    def adapted(kernel, update):
        changed = kernel + 2 * update["a"] @ update["b"]
        norm, norm_changed = (jnp.linalg.norm(x, axis=1) for x in (kernel, jax.lax.stop_gradient(changed)))
        return changed * ((norm + update["magnitude"]) / norm_changed)[:, None]

    def merged(lora):
        return loss({name: adapted(params[name], lora[name]) for name in DIMS}, BATCH, None)

    lora = params["lora"]
    for _ in range(num_steps):
        lora = jax.tree.map(lambda p, g: p - RATE * g, lora, jax.grad(merged)(lora))
    return lora


def trained():
    lora = {"rank": RANK, "alpha": 2 * RANK, "paths": list(DIMS), "use_dora": True}
    made = training(
        init, loss, optax.sgd(RATE), BATCH, mesh="fsdp=4 tensor=2", rules=["fsdp", "megatron"], dims=DIMS, lora=lora
    )
    state, step = made.compile_init(QUICK)(), made.compile_step()
    first = jax.device_get(state.params)
    for _ in range(2):  # `b` begins at zero, so the gradient of `a` is zero in the first step
        state, _ = step(state, made.put(BATCH))
    return first, jax.device_get(state.params), inspect(step.compiled, made.mesh)


@pytest.fixture(scope="module")
def in_loop():
    return trained()


def test_merging_in_the_loop_is_equal_to_one_device(in_loop):
    first, params, _ = in_loop
    expected = by_hand(first, 2)
    assert max(np.abs(x).max() for x in jax.tree.leaves(expected["up"]["a"] - first["lora"]["up"]["a"])) > 1e-4
    pairs = zip(jax.tree.leaves(params["lora"]), jax.tree.leaves(expected), strict=True)
    assert max(np.abs(a - b).max() for a, b in pairs) < 1e-6


def test_merging_in_the_loop_holds_no_stack_of_kernels(in_loop, monkeypatch):
    """Before the loop, the sums, their gradients and the gathered kernels of all layers are held. Bytes stay."""
    monkeypatch.setattr(partitioned_loss, "made_in_loops", lambda closed, num_params: closed)
    before = trained()[2]
    stack = 2 * LAYERS * WIDTH * HIDDEN * 4 // 2  # both kernels of all layers, on a device of `tensor`
    assert before.memory.temporaries > 3 * stack
    assert in_loop[2].memory.temporaries < stack / 2
    assert in_loop[2].bytes_per_axis == before.bytes_per_axis
