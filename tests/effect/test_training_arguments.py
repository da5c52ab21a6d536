"""No argument of `meshpar.training` is without effect: its change shows in the traced programs or in the shardings."""

from __future__ import annotations

from inspect import signature

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar import AxisRules, MeshLayout, Parallel, Reduce, constrain, training
from meshpar.errors import ShardingError
from meshpar.optim import AdamW, Cosine
from tests.effect.fingerprint import of_training

ROWS = {"x": np.ones((16, 8, 4), "f")}


def init(key):
    return {"up": jax.random.normal(key, (4, 8)), "down": jax.random.normal(key, (8, 4))}


def wide_init(key):
    return {"up": jnp.ones((4, 64)), "down": jnp.ones((64, 4))}


def loss(params, batch, key):
    hidden = jnp.tanh(batch["x"] @ params["up"])
    return jnp.square(hidden @ params["down"]).mean()


def halved(params, batch, key):
    return 0.5 * loss(params, batch, key)


def pinned(params, batch, key):
    return loss(params, {"x": constrain(batch["x"], "batch", "height", "embed")}, key)


def counting(params, batch, key, carried):
    return loss(params, batch, key), {}, {"n": carried["n"] + 1}


BASE = {
    "init": init, "loss": loss, "tx": optax.sgd(0.1), "batch": ROWS, "mesh": MeshLayout(data=4, tensor=2),
    "rules": AxisRules(preset="megatron"), "dims": {"up": ("embed", "mlp"), "down": ("mlp", "embed")},
}  # fmt: skip
NAMED_AXES = {"dims": {"up": ("embed", "tp"), "down": ("tp", "embed")}}
CHANGES = {
    "init": ({}, lambda key: jax.tree.map(jnp.zeros_like, init(key))),
    "loss": ({}, halved),
    "tx": ({}, optax.adam(0.1)),
    "batch": ({}, {"x": np.ones((32, 8, 4), "f")}),
    "mesh": ({}, MeshLayout(data=2, tensor=4)),
    "rules": ({}, AxisRules(preset="megatron", embed=("data",))),
    "dims": ({}, {"up": ("mlp", "embed"), "down": ("embed", "mlp")}),
    "batch_dims": ({"rules": AxisRules(preset="megatron", height=("tensor",)), "activation_dims": ("height",)},
                   {"x": ("batch", "height", "")}),
    "activation_dims": ({"loss": pinned, "rules": AxisRules(preset="megatron", height=("tensor",))}, ("height",)),
    "axes": (NAMED_AXES, {"tp": "tensor"}),
    "carried": ({"loss": lambda params, batch, key, *more: counting(params, batch, key, *more) if more else loss(
        params, batch, key)}, lambda key: {"n": jnp.zeros(())}),
    "evaluation": ({}, halved),
    "draws": ({}, True),
    "seed": ({"draws": True}, 1),
    "lowering": ({}, "auto"),
    "manual": ({"rules": AxisRules(preset="replicated"), "mesh": MeshLayout(data=8)}, True),
    "parallel": ({"rules": AxisRules(preset="replicated"), "mesh": MeshLayout(data=8), "manual": True},
                 Parallel(gradient_reduction=Reduce(across="int8"))),
    "compute_dtype": ({}, jnp.bfloat16),
    "accum_dtype": ({"num_microbatches": 2}, jnp.bfloat16),
    "num_microbatches": ({}, 2),
    "number_format": ({}, "int8"),
    "num_steps": ({"tx": AdamW(lr=0.1, schedule=Cosine()), "num_steps": 10}, 20),
    "lora": ({}, {"rank": 1, "paths": ["up"]}),
    "freeze": ({}, "up"),
    "prune": ({"num_steps": 10}, {"kind": "magnitude", "sparsity": 0.5, "paths": ["up"], "every": 1, "times": 1}),
    "clip_norm": ({}, 0.5),
    "ema": ({}, 0.9),
    "params_dtype": ({}, jnp.bfloat16),
    "master_dtype": ({"params_dtype": jnp.bfloat16}, jnp.float32),
    "rounding": ({"params_dtype": jnp.bfloat16}, "stochastic"),
    "offload_optimizer": ({"tx": optax.sgd(0.1, momentum=0.9), "init": wide_init}, True),
}  # fmt: skip
"""Argument -> (others that it needs, another value)."""


def contrastive(params, batch, key):
    rows = batch["x"][:, 0] @ params["up"]
    return (rows @ rows.T).mean() + loss(params, batch, key)


REFUSING = {"strict": ({"loss": contrastive}, True)}
"""Arguments whose effect is an error when the step is traced."""


@pytest.fixture(autouse=True, scope="module")
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def seen(**arguments):
    """The programs and the shardings of a training; the message, if it is refused."""
    try:
        new = training(**BASE | arguments)
    except ValueError as error:
        return f"refused: {error}"
    return of_training(new)


def test_each_argument_is_in_the_list():
    assert {*signature(training).parameters} == {*CHANGES, *REFUSING}


@pytest.mark.parametrize("argument", REFUSING)
def test_an_argument_that_refuses_has_an_effect(argument):
    others, value = REFUSING[argument]
    seen(**others)
    with pytest.raises(ShardingError, match=argument):
        seen(**others | {argument: value})


@pytest.mark.sample(12)
@pytest.mark.parametrize("argument", CHANGES)
def test_an_argument_has_an_effect(argument):
    others, value = CHANGES[argument]
    before, after = seen(**others), seen(**others | {argument: value})
    assert before == seen(**others)
    assert before != after and not str(after).startswith("refused")


def test_control_an_argument_that_is_dropped_is_found(monkeypatch):
    context = training.__wrapped__.__globals__["ParallelContext"]
    monkeypatch.setitem(
        training.__wrapped__.__globals__, "ParallelContext", lambda **more: context(**more | {"accum_dtype": None})
    )
    others, value = CHANGES["accum_dtype"]
    assert seen(**others) == seen(**others | {"accum_dtype": value})
