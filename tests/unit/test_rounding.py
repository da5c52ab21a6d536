"""Stochastic rounding: unbiased, determined by seed and step, equal under any sharding; rounding to nearest stalls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar.optim.rounding import stochastic_round, with_stochastic_rounding

STEP_OF_1 = 2.0**-7
"""The distance of 1 to the next larger bfloat16."""
NUM = 2**16


def mean_error(rounded, x):
    """The error of the mean, in standard deviations of a mean of Bernoulli variables (Gupta et al.)."""
    fraction = (x - 1) / STEP_OF_1
    deviation = STEP_OF_1 * np.sqrt(fraction * (1 - fraction) / NUM)
    return abs(np.asarray(rounded, np.float64).mean() - x) / deviation


@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.5, 0.9])
def test_the_mean_of_rounded_numbers_is_the_number(fraction):
    """Control: rounded to nearest, the mean is more than 20 standard deviations away."""
    x = 1 + fraction * STEP_OF_1
    rounded = stochastic_round(jnp.full(NUM, x, jnp.float32), jax.random.key(0))
    assert mean_error(rounded, x) < 4
    assert mean_error(jnp.full(NUM, x, jnp.bfloat16), x) > 20


def test_numbers_of_bfloat16_and_those_that_are_not_finite_are_unchanged():
    x = jnp.asarray([0.0, -0.0, 1.0, -3.5, 2.0**-130, jnp.inf, -jnp.inf, jnp.nan], jnp.float32)
    rounded = stochastic_round(x, jax.random.key(1))
    np.testing.assert_array_equal(rounded.astype(jnp.float32), x)


def test_rounding_does_not_depend_on_the_sharding():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.NamedSharding(mesh, jax.P(None, "data"))
    x = jax.random.normal(jax.random.key(3), (4, 64))
    rounded = jax.jit(stochastic_round, out_shardings=sharded)(jax.device_put(x, sharded), jax.random.key(4))
    np.testing.assert_array_equal(rounded, stochastic_round(x, jax.random.key(4)))


def test_negative_numbers_are_unbiased_too():
    x = 1 + 0.3 * STEP_OF_1
    rounded = stochastic_round(jnp.full(NUM, -x, jnp.float32), jax.random.key(2))
    assert mean_error(-rounded, x) < 4


def trained(rounding, num_steps=400, seed=0):
    """Parameters of 1 after updates of -1e-4, each 1/78 of a step of bfloat16."""
    tx = optax.sgd(1e-4)
    tx = with_stochastic_rounding(tx, jnp.float32, seed) if rounding else optax.with_extra_args_support(tx)
    params = jnp.ones(512, jnp.bfloat16)

    def update(params, step):
        updates, _ = tx.update(jnp.ones(512, jnp.float32), tx.init(params), params, step=step)
        with jax.numpy_dtype_promotion("standard"):
            return optax.apply_updates(params, updates), None

    return jax.lax.scan(update, params, jnp.arange(num_steps, dtype=jnp.int32))[0]


def test_small_updates_add_up():
    """Control: rounded to nearest, no parameter ever moves."""
    expected = 1 - 400 * 1e-4
    deviation = np.sqrt(400 * 1e-4 * STEP_OF_1 / 512)  # f(1 - f) steps^2 is at most f steps^2, the update times a step
    assert abs(np.asarray(trained(True), np.float64).mean() - expected) < 4 * deviation
    assert (trained(False) == 1).all()


def test_seed_and_step_determine_the_rounding():
    np.testing.assert_array_equal(trained(True, 20), trained(True, 20))
    assert (trained(True, 20) != trained(True, 20, seed=1)).any()
