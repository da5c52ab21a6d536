"""What counts as equal blocks of a loss, and what each block reads of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.partition.blocks import blocks, sunk
from meshpar.tree import flatten_with_paths

PARAMS = {f"block_{i}": {"w": jnp.ones((2, 2))} for i in range(4)} | {"head": jnp.ones(2)}
TABLES = np.arange(8.0, dtype=np.float32).reshape(4, 2)


def stacks(block, params=PARAMS):
    def loss(params, x):
        keys = jax.random.split(jax.random.key(0), 4)
        for i in range(4):
            x = block(i, x, params[f"block_{i}"]["w"], keys[i])
        return (x * params["head"]).sum()

    flat = flatten_with_paths(params)
    closed = sunk(jax.make_jaxpr(loss)(params, jnp.ones((3, 2))), len(flat), 1)
    return list(blocks(closed, list(flat), [(x.shape, x.dtype) for x in flat.values()]))


def product(i, x, w, key):
    return jnp.tanh(x @ w)


def checkpointed(i, x, w, key):
    return jax.checkpoint(lambda x: jnp.tanh(x @ w))(x)


def numbered(i, x, w, key):
    return jnp.tanh(x @ w) * (0.1 * i + 1)


def tabled(i, x, w, key):
    return jnp.tanh(x @ w) + TABLES[i]


def drawing(i, x, w, key):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.tanh(x @ w), x)


def alternating(i, x, w, key):
    return jnp.tanh(x @ w) if i % 2 else jnp.sin(x @ w) + x


def other_first(i, x, w, key):
    return jnp.tanh(x @ w) if i else jnp.sin(x.astype(jnp.float16).astype(jnp.float32) @ w)


def other_last(i, x, w, key):
    return jnp.tanh(x @ w) if i < 3 else jnp.sin(x)[:2] @ w


def in_turn(i, x, w, key):
    return jax.checkpoint(jax.jit(lambda x: jnp.tanh(x @ w) + TABLES[i]))(x)


@pytest.mark.parametrize(
    ("block", "num_layers", "num_rows"),
    [
        (product, 4, 0), (checkpointed, 4, 0), (alternating, 2, 0), (numbered, 4, 1), (tabled, 4, 1), (in_turn, 4, 1),
        (drawing, 4, 1), (other_first, 3, 0), (other_last, 3, 0),
    ],
)  # fmt: skip
def test_equal_blocks_are_found(block, num_layers, num_rows):
    (stack,) = stacks(block)
    assert (stack.num_layers, len(stack.rows), len(stack.carry)) == (num_layers, num_rows, 1)


def hidden_number(i, x, w, key):
    return jax.checkpoint(lambda x: jnp.tanh(x @ w) * (1 + 1e-7 * i))(x)


def hidden_derivative(i, x, w, key):
    @jax.custom_vjp
    def scaled(x):
        return x

    scaled.defvjp(lambda x: (x, None), lambda _, g: (g * (i + 1),))
    return scaled(jnp.tanh(x @ w))


def backward(i, x, w, key):
    return jnp.tanh(x @ w) if i < 2 else jnp.sin(x @ w)


@pytest.mark.parametrize("block", [hidden_number, hidden_derivative, backward])
def test_blocks_that_differ_in_what_they_contain_are_not_equal(block):
    assert not stacks(block)


def test_blocks_of_other_shapes_are_not_equal():
    wide = PARAMS | {"block_3": {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}}
    (stack,) = stacks(product, wide)
    assert stack.num_layers == 3
