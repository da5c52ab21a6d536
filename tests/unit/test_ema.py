"""The average of the parameters is unbiased, and is that of the master parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar.optim import ema as ema_module
from meshpar.optim.ema import averaged, with_ema
from meshpar.optim.master import with_master
from meshpar.train.state import TrainState


def after(tx: optax.GradientTransformation, num_updates: int, dtype=jnp.float32) -> TrainState:
    """A parameter that begins at 100 and is 1, 2, 3, ... after the updates."""
    params = {"w": jnp.full(3, 100, dtype)}
    state = tx.init(params)
    for i in range(num_updates):
        target = jnp.float32(i + 1)
        updates, state = tx.update({"w": params["w"].astype(jnp.float32) - target}, state, params)
        params = jax.tree.map(lambda p, u: p + u.astype(p.dtype), params, updates)
    return TrainState(jnp.int32(num_updates), params, state, jnp.int32(0))


def bias(decay: float, num_updates: int) -> float:
    found = averaged(after(with_ema(optax.sgd(1.0), decay), num_updates))["w"]
    weights = np.float64(decay) ** np.arange(num_updates)[::-1]
    return float(np.abs(found - np.average(np.arange(1, num_updates + 1), weights=weights)).max())


@pytest.mark.parametrize("decay", [0.5, 0.99, 0.9999])
@pytest.mark.parametrize("num_updates", [1, 2, 7])
def test_the_average_is_unbiased_from_the_first_update_on(decay, num_updates):
    assert bias(decay, num_updates) < 1e-5


def test_control_an_average_without_its_correction_is_biased(monkeypatch):
    monkeypatch.setattr(ema_module, "newest_weight", lambda decay, count, dtype: jnp.asarray(1 - decay, dtype))
    assert bias(0.99, 7) > 1


def test_without_an_update_or_an_average_the_parameters_are_returned():
    assert averaged(after(with_ema(optax.sgd(1.0), 0.9), 0))["w"][0] == 100
    assert averaged(after(optax.sgd(1.0), 4))["w"][0] == 4


def test_the_average_is_that_of_the_master_parameters():
    """2 + 2^-10 is no bfloat16: an average of the rounded parameters would be 2."""
    tx = with_ema(with_master(optax.sgd(1.0), jnp.float32), 0.5)
    params = {"w": jnp.full(1, 2, jnp.bfloat16)}
    state = tx.init(params)
    _, state = tx.update({"w": jnp.full(1, -(2.0**-10))}, state, params)
    found = averaged(TrainState(jnp.int32(1), params, state, jnp.int32(0)))
    assert found["w"].dtype == jnp.float32 and found["w"][0] == 2 + 2**-10
