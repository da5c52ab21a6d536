"""`fit` trains a user's own model in one call, and resumes it to the bit."""

from __future__ import annotations

import json
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshpar import ConfigError, RunError, fit, training
from meshpar.experiment.arrays import batches
from meshpar.interop.module import is_module
from tests.comparison import largest_difference

X = np.random.default_rng(0).normal(size=(64, 8)).astype("f")
DATA = {"x": X, "y": np.sin(X)}
DIMS = {"up.kernel": ("embed", "mlp"), "down.kernel": ("mlp", "embed")}
OPTIONS = {"mesh": "data=2 fsdp=2 tensor=2", "rules": {"preset": ["fsdp", "megatron"], "unnamed": []}}


@pytest.fixture(autouse=True, scope="module")
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(16, use_bias=False, name="up")(x))
        return nn.Dense(8, use_bias=False, name="down")(nn.Dropout(0.1, deterministic=not train)(nn.tanh(x)))


class NNX(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(16, 8, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.tanh(self.norm(self.up(x)))))


def linen_loss(model, batch, key):
    return jnp.square(model(batch["x"], rngs={"dropout": key}) - batch["y"]).mean()


def linen_error(model, batch):
    return jnp.square(model(batch["x"], train=False) - batch["y"]).mean()


def nnx_loss(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"]).mean(), {"size": jnp.abs(batch["y"]).mean()}


MODELS = {"Linen": (Linen(), linen_loss, {"evaluation": linen_error}), "NNX": (NNX, nnx_loss, {})}


def fitted(name, run_dir, num_steps, data=DATA, **more):
    model, loss, options = MODELS[name]
    size = {} if callable(data) else {"batch_size": 16}
    return fit(
        model, loss, data, tx=optax.adam(1e-2), num_steps=num_steps, run_dir=run_dir, dims=DIMS, seed=1,
        **OPTIONS | options | size | more,
    )  # fmt: skip


def records(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_stops_goes_on_as_if_it_had_not(name, tmp_path):
    held_out = {key: x[:32] for key, x in DATA.items()}
    whole = fitted(name, tmp_path / "whole", 6, held_out=held_out, eval_every=3)
    fitted(name, tmp_path / "parts", 4)
    again = fitted(name, tmp_path / "parts", 6, mesh="fsdp=4 tensor=2" if name == "NNX" else OPTIONS["mesh"])
    assert largest_difference(whole, again) < (1e-5 if name == "NNX" else 1e-9)
    evaluated = [one["step"] for one in records(tmp_path / "whole") if one["kind"] == "evaluation"]
    assert evaluated == [3, 6]
    assert [one["step"] for one in records(tmp_path / "parts") if one["kind"] == "restored"] == [4]


def test_a_training_is_fitted_to_a_function_of_the_step(tmp_path):
    read = batches(DATA, 16, seed=1)
    made = training(NNX, nnx_loss, optax.adam(1e-2), read[0], dims=DIMS, seed=1, **OPTIONS)
    state = fit(made, data=lambda step: read[step], num_steps=3, run_dir=tmp_path / "a", seed=1)
    assert largest_difference(state, fitted("NNX", tmp_path / "b", 3)) == 0


def test_each_row_is_read_once_in_an_epoch():
    read = batches({"row": np.arange(6)}, 4, seed=0)
    rows = np.concatenate([read[index]["row"] for index in range(3)])
    assert sorted(rows[:6]) == sorted(rows[6:]) == [*range(6)]
    assert [*rows[:6]] != [*rows[6:]]


def test_a_class_with_some_of_its_arguments_is_a_model():
    class Sized(nnx.Module):
        def __init__(self, size, *, rngs):
            self.down = nnx.Linear(8, size, rngs=rngs)

    assert is_module(partial(Sized, 8)) and is_module(partial(Sized, size=8))
    assert not is_module(partial(nnx_loss, None))


REFUSED = {
    "no optimizer": (partial(fit, NNX, nnx_loss, DATA, num_steps=1), "tx\n    it is missing"),
    "no data": (partial(fit, NNX, nnx_loss, tx=optax.sgd(0.1), num_steps=1), "data\n    it is missing"),
    "no size": (
        partial(fitted, "NNX", num_steps=1, batch_size=None),
        "batch_size\n    it is the number of rows of a step",
    ),
    "rows": (partial(fitted, "NNX", num_steps=1, data={"x": X, "y": X[:3]}), "x has 64 rows, y has 3 rows"),
    "rows of an evaluation": (
        partial(fitted, "NNX", num_steps=1, held_out={"x": X[:5], "y": X[:5]}),
        "held_out: its 5 rows cannot be cut into batches of 16",
    ),
    "evaluations of nothing": (partial(fitted, "NNX", num_steps=1, eval_every=1), "eval_every\n    there are no rows"),
    "an option": (partial(fitted, "NNX", num_steps=1, rate=3), "rate\n    training has no such argument"),
    "carried": (
        partial(fitted, "NNX", num_steps=1, carried=lambda key: {}),
        "carried\n    a Flax module carries its own",
    ),
    "another loss": (
        partial(fit, NNX, lambda params: 0.0, DATA, tx=optax.sgd(0.1), num_steps=1, batch_size=16, **OPTIONS),
        "loss: a loss of a Flax module is def loss(model, batch), or (model, batch, key)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case, tmp_path):
    call, message = REFUSED[case]
    with pytest.raises(ConfigError) as error:
        call(run_dir=tmp_path / "run")
    assert message in str(error.value)
    assert not (tmp_path / "run").exists()


def test_another_size_of_a_batch_does_not_resume(tmp_path):
    fitted("NNX", tmp_path, 1)
    with pytest.raises(ConfigError, match=r"batch_size\n    was 16 in .*: rows would be read twice"):
        fitted("NNX", tmp_path, 2, batch_size=32)


def test_data_that_end_say_so(tmp_path):
    def end(step):
        raise IndexError("no such batch")

    with pytest.raises((RunError, IndexError), match="no such batch"):
        fitted("NNX", tmp_path, 1, data=end)
