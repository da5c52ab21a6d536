"""The state of every Optax optimizer is initialized sharded and stays so, and its updates equal one device's."""

from __future__ import annotations

import inspect
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax._src import alias

from meshpar import AxisRules, MeshLayout, training
from meshpar.verification.compare import compare, without_gradient
from meshpar.verification.trial import Trial
from meshpar.verification.verify import _widened, wide_batch

MESH = MeshLayout(data=2, fsdp=2, tensor=2)
RULES = AxisRules(preset=("fsdp", "megatron"))
DIMS = {"up": ("embed", "mlp"), "down": ("mlp", "embed"), "bias": ("mlp",), "scale": ("embed",)}
SHAPES = {"up": (8, 16), "down": (16, 8), "bias": (16,), "scale": (8,)}
OPTIMIZERS = {
    "adabelief": optax.adabelief(1e-2),
    "adadelta": optax.adadelta(1e-1),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "adagrad": optax.adagrad(1e-2),
    "adam": optax.adam(1e-2),
    "adamax": optax.adamax(1e-2),
    "adamaxw": optax.adamaxw(1e-2),
    "adamw": optax.adamw(1e-2),
    "adan": optax.adan(1e-2),
    "amsgrad": optax.amsgrad(1e-2),
    "fromage": optax.fromage(1e-2),
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(1e-2),
    "lbfgs": optax.lbfgs(1e-2, memory_size=3, linesearch=None),
    "lion": optax.lion(1e-2),
    "nadam": optax.nadam(1e-2),
    "nadamw": optax.nadamw(1e-2),
    "noisy_sgd": optax.noisy_sgd(1e-2, key=0),
    "novograd": optax.novograd(1e-2),
    "optimistic_adam_v2": optax.optimistic_adam_v2(1e-2),
    "optimistic_gradient_descent": optax.optimistic_gradient_descent(1e-2),
    "polyak_sgd": optax.polyak_sgd(),
    "radam": optax.radam(1e-2),
    "rmsprop": optax.rmsprop(1e-2, momentum=0.9),
    "rprop": optax.rprop(1e-2),
    "sgd": optax.sgd(1e-2, 0.9),
    "sign_sgd": optax.sign_sgd(1e-2),
    "signum": optax.signum(1e-2),
    "sm3": optax.sm3(1e-2),
    "yogi": optax.yogi(1e-2),
}
# Optimizers whose states have a structure of their own; every other one resembles one of these.
IN_CI = {"adafactor", "adamw", "lbfgs", "novograd", "noisy_sgd", "polyak_sgd", "sm3"}
every_optimizer = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.slow) for name in OPTIMIZERS]
)


@pytest.fixture(autouse=True, scope="module")
def _precision():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def rows(seed):
    rng = np.random.default_rng(seed)
    return wide_batch({name: rng.normal(size=(16, 8)).astype("f") for name in ("x", "y")})


def loss(params, batch, key):
    hidden = jnp.tanh(batch["x"] @ params["up"] + params["bias"])
    return jnp.square((hidden @ params["down"]) * params["scale"] - batch["y"]).mean()


def init(key):
    keys = dict(zip(SHAPES, jax.random.split(key, len(SHAPES)), strict=True))
    return {name: jax.random.normal(keys[name], shape) / 2 for name, shape in SHAPES.items()}


@cache
def trained(name, layout):
    """The first state, the state after three steps, and what the steps computed."""
    mesh = layout.build(jax.devices()[: layout.requested() or 1])
    new = training(init, loss, OPTIMIZERS[name], rows(0), mesh=mesh, rules=RULES, dims=DIMS)
    trial = Trial(_widened(new))
    start = trial.start()
    return start, *trial.run(start, [rows(seed) for seed in (1, 2, 3)])


def test_every_optimizer_of_optax_is_tested():
    made = {name for name, value in vars(alias).items() if callable(value) and "learning_rate" in parameters(value)}
    assert made & set(vars(optax)) - {"optimistic_adam"} <= OPTIMIZERS.keys()


def parameters(function):
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


@pytest.mark.sample(4)
@every_optimizer
def test_the_state_of_an_optimizer_is_initialized_sharded(name):
    start, _, _ = trained(name, MESH)
    by_shape = {x.shape: x for x in jax.tree.leaves(start.params)}
    for x in jax.tree.leaves(start.opt_state):
        like = by_shape.get(x.shape)
        assert like is None or x.sharding.is_equivalent_to(like.sharding, x.ndim), x.shape
        # An array that is shaped like no parameter, but as large as one, is sharded too.
        assert x.size < 16 or not x.sharding.is_fully_replicated


@every_optimizer
def test_the_update_keeps_dtypes_and_shardings(name):
    start, after, _ = trained(name, MESH)
    for before, x in zip(jax.tree.leaves(start), jax.tree.leaves(after), strict=True):
        assert x.dtype == before.dtype
        assert x.sharding.is_equivalent_to(before.sharding, x.ndim)


@every_optimizer
def test_an_optimizer_is_equal_to_one_device(name):
    reference = trained(name, MeshLayout())[2]
    found = compare(trained(name, MESH)[2], reference, without_gradient(reference))
    assert found.first is None
