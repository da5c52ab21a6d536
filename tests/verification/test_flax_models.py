"""Flax models from elsewhere are inspected and verified as they are."""

from __future__ import annotations

from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshpar import AxisRules, MeshLayout, VerificationError, inspect, partitioned, training, verify
from meshpar.parallel.context import current

ROWS = 8


class CNN(nn.Module):
    """The model of Flax's MNIST example."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(features=32, kernel_size=(3, 3))(x)
        x = nn.relu(x)
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.Conv(features=64, kernel_size=(3, 3))(x)
        x = nn.relu(x)
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.Dense(features=256)(x)
        x = nn.relu(x)
        return nn.Dense(features=10)(x)


class MLP(nnx.Module):
    """The model of Flax's first NNX guide, dropout and all."""

    def __init__(self, din, dmid, dout, *, rngs):
        self.linear1 = nnx.Linear(din, dmid, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)
        self.linear2 = nnx.Linear(dmid, dout, rngs=rngs)

    def __call__(self, x, rngs=None):
        return self.linear2(self.dropout(nnx.gelu(self.linear1(x)), rngs=rngs))


def digits(seed, size):
    rng = np.random.default_rng(seed)
    image = rng.random((ROWS, size, size, 1), np.float32)
    label = rng.integers(0, 10, ROWS, np.int32)
    return {"image": image, "label": label}


def cnn_training(mesh, rules, **more):
    def loss(params, batch, key):
        logits = CNN().apply({"params": params}, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def init(key):
        return CNN().init(key, np.zeros((1, 12, 12, 1), np.float32))["params"]

    devices = jax.devices()[: mesh.requested()]
    return training(init, loss, optax.sgd(0.1, 0.9), digits(0, 12), mesh=mesh.build(devices), rules=rules, **more)


TENSOR = {
    "Dense_0.kernel": ("pixels", "mlp"),
    "Dense_0.bias": ("mlp",),
    "Dense_1.kernel": ("mlp", "classes"),
    "Dense_1.bias": ("classes",),
}
RULES = AxisRules(preset="megatron", unnamed=(), pixels=(), classes=())


@pytest.fixture(scope="module")
def cnn():
    return cnn_training(MeshLayout(data=2, tensor=2), RULES, dims=TENSOR)


def test_a_linen_model_is_verified(cnn):
    proof = verify(cnn, [digits(seed, 12) for seed in range(2)])
    assert proof.is_equal, str(proof)
    assert [row.name for row in proof.rows][:3] == ["data=2, tensor=2", "data=2", "tensor=2"]


@pytest.mark.parametrize("is_wrong", [False, True], ids=["right", "planted"])
def test_a_wrong_signature_of_a_kernel_is_blamed_on_the_axis_that_it_lets_in(is_wrong):
    """The kernel needs all rows; its signature says that each device may have a part of them."""
    centred = partitioned("rows size -> rows size", lambda x: x - x.mean(0), whole=[] if is_wrong else ["rows"])

    def loss(params, batch, key):
        return jnp.square(centred(jnp.tanh(batch["image"].reshape(-1, 16) @ params["w"]))).mean()

    model = training(
        lambda key: {"w": jax.random.normal(key, (16, 4))}, loss, optax.sgd(0.1), digits(0, 4),
        mesh=MeshLayout(data=2, tensor=2).build(jax.devices()[:4]), rules=AxisRules(preset="megatron"),
        dims={"w": ("embed", "mlp")},
    )  # fmt: skip
    proof = verify(model, [digits(seed, 4) for seed in range(2)])
    assert [row.name for row in proof.culprits] == (["data=2"] if is_wrong else [])


def test_a_linen_model_is_inspected(cnn):
    report = inspect(cnn.compile_step().compiled, cnn.mesh)
    assert report.bytes_per_axis["data"] > 0
    tensors = {tensor for collective in report.collectives for tensor in collective.tensors}
    assert "state.params.Conv_0.kernel" in tensors


def test_an_nnx_model_whose_microbatches_draw_is_verified():
    graph, _ = nnx.split(nnx.eval_shape(lambda: MLP(16, 32, 10, rngs=nnx.Rngs(0))), nnx.Param)

    def init(key):
        return nnx.state(MLP(16, 32, 10, rngs=nnx.Rngs(key)), nnx.Param)

    def loss(params, batch, key):
        model = nnx.merge(graph, params)
        logits = model(batch["image"].reshape(-1, 16), rngs=nnx.Rngs(dropout=key))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    mesh = MeshLayout(data=2).build(jax.devices()[:2])
    rules = AxisRules(preset="replicated", unnamed=())
    more = {"draws": True, "num_microbatches": 2}
    mlp = training(init, loss, optax.adamw(1e-2), digits(0, 4), mesh=mesh, rules=rules, **more)
    proof = verify(mlp, [digits(seed, 4) for seed in range(2)])
    assert proof.is_equal, str(proof)
    assert proof.draws


class Narrow(nn.Module):
    """A model with a dtype of its own, as many public ones have, with loops, recomputation and a branch."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, dtype=np.float32)(x)
        layers = nn.scan(
            nn.remat(NarrowLayer), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )  # fmt: skip
        x, _ = layers()(x, None)
        x = jax.lax.cond(x.shape[0] > 1, jnp.tanh, jnp.cos, x)
        x += nn.RNN(nn.OptimizedLSTMCell(8))(x[:, None])[:, 0]  # its first state is float32
        x = x.at[:, 0].add(jnp.float32(0.5) * x[:, 1])
        x = jax.lax.fori_loop(0, 2, lambda i, x: x / (1 + x * x), jax.lax.stop_gradient(x)) + x
        return nn.Dense(10, dtype=np.float32)(x)


class NarrowLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.relu(nn.Dense(8, dtype=np.float32)(x)), None


def narrow(last=lambda loss: loss):
    def loss(params, batch, key):
        logits = Narrow().apply({"params": params}, batch["image"].reshape(-1, 16))
        return last(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean())

    return training(
        lambda key: Narrow().init(key, jnp.ones((1, 16)))["params"], loss, optax.sgd(0.1), digits(0, 4),
        mesh=MeshLayout(data=4).build(jax.devices()[:4]), rules=AxisRules(preset="replicated", unnamed=()),
    )  # fmt: skip


def test_a_model_that_computes_in_float32_is_verified_in_float64():
    found = verify(narrow(), [digits(seed, 4) for seed in range(2)])
    assert found.is_equal, str(found)


def test_a_gradient_of_its_own_in_a_model_in_float32_is_refused():
    @jax.custom_vjp
    def own(x):
        return x

    own.defvjp(lambda x: (x, None), lambda _, grad: (2 * grad,))
    with pytest.raises(VerificationError, match="custom_vjp_call has a program of its own: rounding would hide"):
        verify(narrow(own), [digits(seed, 4) for seed in range(2)])


@pytest.mark.parametrize("factor", [1 + 2**-23, 1 + 2**-10])
def test_initial_numbers_may_differ_by_the_rounding_of_their_dtype(factor):
    """Programs of other meshes round a float32 initialization otherwise. More than that is a fault."""

    def init(key):
        ctx = current()
        on_mesh = ctx is not None and ctx.mesh.size > 1
        return {"w": jax.random.normal(key, (16,), np.float32) * np.float32(factor if on_mesh else 1)}

    linear = training(
        init, lambda params, batch, key: (batch["image"].reshape(-1, 16) @ params["w"]).mean(),
        optax.sgd(0.1), digits(0, 4), mesh=MeshLayout(data=2).build(jax.devices()[:2]),
        rules=AxisRules(preset="replicated", unnamed=()),
    )  # fmt: skip
    linear = replace(linear, init=init)
    proof = verify(linear, [digits(seed, 4) for seed in range(2)])
    assert [row.name for row in proof.culprits] == ([] if factor < 1.0001 else ["data=2"]), str(proof)


def test_one_batch_is_not_enough(cnn):
    with pytest.raises(VerificationError, match="the run is interrupted between them"):
        verify(cnn, [digits(0, 12)])
