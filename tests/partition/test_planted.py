"""Planted faults in the rules of the partitioner: the plan's laws, JAX's types or the values show each of them."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from meshpar import AxisRules, MeshLayout, partitioned, training
from meshpar.partition import moved
from meshpar.partition.layout import Layout
from meshpar.partition.rules import RULES, contraction, derivatives, indexing, random, reduction
from meshpar.partition.rules.rule import signed
from meshpar.partition.signature import Operand, Signature, assign
from tests.partition.functions import on_one_device, on_shards
from tests.partition.operations import ROWS, X, attention, clipped, floats, ints

SPLIT = (("data",), ("tensor",))


@pytest.fixture(autouse=True)
def _precision(float64):
    with jax.numpy_dtype_promotion("standard"):
        yield


def is_equal(function, arguments, axes) -> bool:
    pairs = zip(
        jax.tree.leaves(on_shards(function, arguments, axes)),
        jax.tree.leaves(on_one_device(function, arguments)),
        strict=True,
    )
    return all(np.abs(np.float64(a) - np.float64(b)).max(initial=0) < 1e-10 for a, b in pairs)


PRODUCT = (lambda x, w: jnp.tanh(x @ w), (X, floats(8, 4)), (SPLIT, (("tensor",), ())))
MAXIMUM = (lambda x: jnp.exp(x - x.max(1, keepdims=True)), (X,), (SPLIT,))
LOOKUP = (lambda t, i: jnp.take(t, i, 0), (X, ints(4, 4, 2)), ((("tensor",), ()), (("data",), ())))
NOISE = (lambda x: x * jax.random.bernoulli(jax.random.key(7), 0.5, x.shape), (X,), (SPLIT,))
SLICED = (lambda x, y: jnp.tanh(x) * y, (X, floats(4, 8)), (SPLIT, ((), ())))
OWN = (lambda x, y: clipped(x, y * jnp.ones((4, 8))), (X, floats(1, 8)), (SPLIT, ((), ("tensor",))))
ADDED = (
    lambda t, x, i: t.at[i].add(x), (X, floats(4, 8), ints(4, 4)), (((), ()), (("data",), ()), (("data",),)),
)  # fmt: skip
ATTENTION = (
    attention,
    tuple(floats(4, 4, 2, 4) for _ in range(3)),
    ((("data",), (), ("tensor",), ()), (("data",), (), ("tensor",), ()), ((), (), (), ())),
)
CASES = {
    "product": PRODUCT, "maximum": MAXIMUM, "lookup": LOOKUP, "noise": NOISE, "sliced": SLICED, "own": OWN,
    "added": ADDED, "attention": ATTENTION,
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_without_a_fault_the_cases_are_equal(name):
    assert is_equal(*CASES[name])


def test_a_dropped_sum_breaks_a_law_of_the_plan(monkeypatch):
    rule = signed(lambda eqn: replace(contraction.dot_general(eqn), summed=()))
    monkeypatch.setitem(RULES, "dot_general", rule)
    with pytest.raises(AssertionError, match="lose the axes that shard"):
        is_equal(*PRODUCT)


def test_an_axis_that_shards_two_dims_breaks_a_law_of_the_plan(monkeypatch):
    def twice(eqn):
        signature = contraction.dot_general(eqn)
        (out,) = signature.outs
        return replace(signature, outs=((out[0], out[0]),), summed=(("contracting", 0),))

    monkeypatch.setitem(RULES, "dot_general", signed(twice))
    with pytest.raises(AssertionError, match="an axis is used twice"):
        is_equal(lambda x, w: x @ w, (floats(4, 8), floats(8, 4)), (SPLIT, ((), ())))


def test_a_maximum_without_communication_is_found_by_types(monkeypatch):
    monkeypatch.setattr(reduction, "_extreme", lambda x, dims, axes, own, over: own(x)[0])
    with pytest.raises(AssertionError, match="a result differs over tensor"):
        is_equal(*MAXIMUM)


def test_a_sum_that_ends_twice_is_found(monkeypatch):
    perform = moved._perform

    def doubled(move, x):
        return perform(move, x) * (2 if move.kind == "all-reduce" else 1)

    monkeypatch.setattr(moved, "_perform", doubled)
    assert not is_equal(*PRODUCT)


def test_a_slice_that_is_off_by_one_shard_is_found(monkeypatch):
    shard = moved.shard
    monkeypatch.setattr(moved, "shard", lambda x, axes, dim: jnp.roll(shard(x, axes, dim), 1, dim))
    assert not is_equal(*SLICED)


def test_an_index_beyond_the_shard_that_is_not_masked_is_found(monkeypatch):
    where = jnp.where
    monkeypatch.setattr(indexing.jnp, "where", lambda flags, x, y: where(flags | True, x, y))
    assert not is_equal(*LOOKUP)


def test_random_bits_that_are_the_same_on_all_devices_are_found(monkeypatch):
    bits = random._bits
    monkeypatch.setattr(
        random, "_bits", lambda key, shape, local, axes, width: bits(key, shape, local, ((),) * len(axes), width)
    )
    assert not is_equal(*NOISE)


def test_a_scatter_that_adds_to_the_operand_on_each_device_is_found(monkeypatch):
    monkeypatch.setattr(indexing.lax, "axis_index", lambda axes: jnp.zeros((), jnp.int32))
    assert not is_equal(*ADDED)


@jax.custom_vjp
def scaled(x, w):
    return x * w


scaled.defvjp(lambda x, w: (x * w, (x, w)), lambda saved, ct: (ct * saved[1], (ct * saved[0]).sum(0)))


def gradient_of_a_scale():
    """The gradient of a parameter, which each device has a copy of, by a derivative of the user's own."""
    batch = {"x": X}
    mesh = MeshLayout(data=2).build(jax.devices()[:2])
    rules = AxisRules(preset="replicated", unnamed=())
    adopted = training(
        lambda key: {"w": jnp.arange(8.0)},
        lambda params, batch, key: jnp.sin(scaled(batch["x"], jnp.tanh(params["w"]))).mean(),
        optax.sgd(1.0), batch, mesh=mesh, rules=rules, compute_dtype=jnp.float64,
    )  # fmt: skip
    state, _ = adopted.compile_step()(adopted.compile_init()(), adopted.put(batch))
    return np.arange(8.0) - np.asarray(state.params["w"])


def test_a_cotangent_that_each_copy_counts_is_found(monkeypatch):
    expected = jax.grad(lambda w: jnp.sin(X * jnp.tanh(w)).mean())(jnp.arange(8.0))
    assert np.abs(gradient_of_a_scale() - expected).max() < 1e-10
    monkeypatch.setattr(derivatives, "_copies", lambda scope, layout: ())
    assert np.abs(gradient_of_a_scale() - expected).max() > 1e-3


def test_a_gather_in_another_order_is_found(monkeypatch):
    gather = lax.all_gather

    def reversed_gather(x, axes, *, axis, tiled, to):
        return jnp.flip(gather(x, axes, axis=axis, tiled=tiled, to=to), axis)

    monkeypatch.setattr(moved.lax, "all_gather", reversed_gather)
    assert not is_equal(lambda x: jnp.cumsum(x, 1), (ROWS[..., 0],), (SPLIT,))


def test_a_wrong_signature_of_a_kernel_is_found():
    """A product may be a sum over devices, a function of the product may not."""

    def kernel(of_product):
        return partitioned("rows in, in out -> rows out", lambda x, w: of_product(x @ w), summed=["in"])

    _, arguments, axes = PRODUCT
    assert is_equal(kernel(jnp.negative), arguments, axes)
    assert not is_equal(kernel(jnp.tanh), arguments, axes)


def test_axes_shard_a_label_only_if_they_divide_every_dim_with_it():
    """The tokens of two rows, between which a kernel attends, may have different numbers."""
    signature = Signature((("tokens",), ("tokens",)), (("tokens",),), lambda call, *shards: shards)

    def assigned(*sizes):
        layouts = [Layout.whole((size,), np.dtype("float32")) for size in sizes]
        return assign(signature, [Operand(layout, (("data",),)) for layout in layouts], {"data": 4})

    assert assigned(8, 12) == {"tokens": ("data",)}
    assert assigned(8, 6) == {}
