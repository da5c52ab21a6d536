"""Random numbers on shards are those of one device, without communication."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.nn.layers import dropout
from meshpar.parallel.context import tracing
from meshpar.partition.moved_values import moved_values
from tests.partition.functions import context, on_one_device, on_shards, plan

SPLIT = (("data",), ("tensor",))
X = np.ones((4, 8))
DRAWS = {
    "bits": lambda key: jax.random.bits(key, (4, 8)),
    "bits of a byte": lambda key: jax.random.bits(key, (4, 8), "uint8"),
    "bits of eight bytes": lambda key: jax.random.bits(key, (4, 8), "uint64"),
    "uniform": lambda key: jax.random.uniform(key, (4, 8)),
    "normal": lambda key: jax.random.normal(key, (4, 8)),
    "bernoulli": lambda key: jax.random.bernoulli(key, 0.3, (4, 8)),
    "randint": lambda key: jax.random.randint(key, (4, 8), 0, 99),
    "truncated": lambda key: jax.random.truncated_normal(key, -1.0, 1.0, (4, 8)),
    "permutation": lambda key: jax.random.permutation(key, 8)[None],
    "split": lambda key: jax.random.normal(jax.random.split(key, 3)[1], (4, 8)),
    "folded": lambda key: jax.random.normal(jax.random.fold_in(key, 5), (4, 8)),
    "gamma": lambda key: jax.random.gamma(key, 2.0, (4, 8)),
    "of many keys": lambda key: jax.vmap(lambda k: jax.random.normal(k, (8,)))(jax.random.split(key, 4)),
}


@pytest.fixture(autouse=True)
def _precision(float64):
    with jax.numpy_dtype_promotion("standard"):
        yield


def used(draw):
    return lambda x: x * draw(jax.random.key(11)).astype(x.dtype)


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_drawn_by_shards_are_those_of_one_device(name):
    function = used(DRAWS[name])
    (found,), _ = on_shards(function, (X,), (SPLIT,))
    (expected,), _ = on_one_device(function, (X,))
    # The sampler of gamma computes with them in another order.
    np.testing.assert_allclose(found, expected, rtol=1e-14 if name == "gamma" else 0, atol=0)


@pytest.mark.parametrize("name", ["bits", "normal", "bernoulli", "truncated"])
def test_no_device_draws_more_than_its_shard_or_sends_any(name):
    program = plan(used(DRAWS[name]), (X,), (SPLIT,), context())
    shapes = [program.layouts[out].local_shape(program.sizes) for step in program.steps for out in step.outs]
    assert max(map(np.prod, shapes)) == 2 * 4
    program.outputs = []
    assert moved_values(program) == []


@pytest.mark.parametrize("over", [(("data",), ("tensor",), ()), ((), ("data",), ("tensor",))])
def test_the_bits_of_dropout_in_a_planned_decoder_are_those_of_one_device(over):
    """By the index of a row in the batch, of a token in the row, and of a channel; none is sent."""
    x, rows = np.random.default_rng(0).normal(size=(4, 8, 6)), np.array([7, 2, 5, 0], np.int32)

    def dropped(x, rows):
        with tracing(replace(context(), manual=False, is_planned=True)):
            return dropout(x, 0.3, jax.random.key(3), rows)

    given = (x, rows), (over, over[:1])
    (found,), gradients = on_shards(dropped, *given)
    np.testing.assert_array_equal(found, dropout(jnp.asarray(x), 0.3, jax.random.key(3), jnp.asarray(rows)))
    np.testing.assert_array_equal(gradients[0], on_one_device(dropped, given[0])[1][0])
    program = plan(dropped, *given, context())
    program.outputs = []
    assert moved_values(program) == []


def test_another_generator_is_drawn_whole():
    def function(x):
        key = jax.random.key(3, impl="rbg")
        return x * jax.random.uniform(key, x.shape)

    (found,), _ = on_shards(function, (X,), (SPLIT,))
    (expected,), _ = on_one_device(function, (X,))
    np.testing.assert_array_equal(found, expected)


def test_dropout_in_a_loop_over_layers_draws_what_one_device_draws():
    def function(x):
        def layer(carry, key):
            keep = jax.random.bernoulli(key, 0.5, carry.shape)
            return jnp.where(keep, carry * 2, 0), None

        return jax.lax.scan(layer, x, jax.random.split(jax.random.key(5), 3))[0]

    (found,), (grad,) = on_shards(function, (X,), (SPLIT,))
    (expected,), (expected_grad,) = on_one_device(function, (X,))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(grad, expected_grad)
