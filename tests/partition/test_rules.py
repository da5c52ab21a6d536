"""Each rule of the partitioner, in many layouts of its operands: values and gradients are those of one device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from meshpar.partition.rules import RULES
from tests.comparison import largest_difference
from tests.partition.functions import on_one_device, on_shards, some_layouts
from tests.partition.operations import BINARY, OPERATIONS, UNARY

pytestmark = pytest.mark.matrix

CASES = [(name, i) for name, cases in OPERATIONS.items() for i in range(len(cases))]
SAMPLED = ("exp", "erf", "stop_gradient", "name", "add", "max")
"""The elementwise operations, which have one rule, that are tried in each run."""
INDIRECT = {
    **dict.fromkeys(("copy_p", "eq_to", "le_to", "lt_to", "scatter_add", "scatter_min", "scatter_max", "scatter_mul",
                     "remat", "checkpoint", "pjit", "core_call", "closed_call", "custom_lin", "unstack", "log2",
                     "one_minus_square", "polynomial", "call_hi_primitive"),
                    "another version's name of an operation that is tried, or one that JAX makes of it"),
    **dict.fromkeys(("random_seed", "random_wrap", "random_unwrap", "random_fold_in", "random_clone", "random_gamma",
                     "platform_index",
                     "threefry2x32", "rng_bit_generator"), "of keys; test_random.py"),
    **dict.fromkeys(("eig", "schur", "geqrf", "householder_product", "lu_pivots_to_permutation", "tridiagonal",
                     "select_and_gather_add"),
                    "in second derivatives, or in qr and lu, which are tried"),
    **dict.fromkeys(("debug_callback", "pure_callback", "io_callback", "debug_print"), "refused; test_refused.py"),
    **dict.fromkeys(("sharding_constraint", "reshard", "shard_map"), "of a mesh; test_constraints.py"),
}  # fmt: skip
"""Primitives without an operation of their own, and why."""


def cases(is_slow):
    for name, index in CASES:
        sampled = name in SAMPLED or not (name in UNARY or name in BINARY)
        marks = [] if sampled and not is_slow else [pytest.mark.slow]
        yield pytest.param(name, index, marks=marks, id=f"{name}-{index}")


@pytest.fixture(autouse=True)
def _precision(float64):
    with jax.numpy_dtype_promotion("standard"):
        yield


def difference(name: str, index: int, axes) -> float:
    function, arguments = OPERATIONS[name][index]
    found = jax.tree.leaves(on_shards(function, arguments, axes))
    expected = jax.tree.leaves(on_one_device(function, arguments))
    assert [x.shape for x in found] == [x.shape for x in expected]
    return max(
        float(np.nanmax(np.abs(np.float64(a) - np.float64(b)), initial=0)) for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(("name", "index"), [*cases(is_slow=False)])
def test_an_operation_on_shards_equals_one_device(name, index):
    for axes in some_layouts(OPERATIONS[name][index][1], 1, seed=index):
        assert difference(name, index, axes) < 1e-10, axes


@pytest.mark.parametrize(("name", "index"), [*cases(is_slow=True)])
def test_an_operation_on_shards_equals_one_device_in_thirty_layouts(name, index):
    for axes in some_layouts(OPERATIONS[name][index][1], 30, seed=100 + index):
        assert difference(name, index, axes) < 1e-10, axes


@pytest.mark.parametrize("shape", [(8,), (4, 8)])
def test_positions_that_are_made_in_shards_equal_one_device(shape):
    """Positions, such as those of a one-hot table, have no operand that says over which axes they differ."""
    x = np.random.default_rng(0).normal(size=(4, 8))
    axes = ((("data",), ("tensor",)),)

    def function(x):
        return x * jax.lax.broadcasted_iota(int, shape, len(shape) - 1)

    assert largest_difference(on_shards(function, (x,), axes)[0], on_one_device(function, (x,))[0]) < 1e-10


@pytest.mark.parametrize("over", [("data", "tensor"), ()])
def test_bytes_look_up_in_a_table_of_more_rows_than_a_byte_can_name(over):
    """Against indices of 32 bits: JAX's gradient of a lookup by bytes is zero, its control here."""
    table, index = np.random.default_rng(0).normal(size=(260, 2)), np.array([[3, 200], [255, 64]], np.uint8)
    looked_up = partial(jnp.take, axis=0)
    expected = on_one_device(looked_up, (table, np.int32(index)))
    assert largest_difference(on_shards(looked_up, (table, index), ((over, ()), ((), ()))), expected) < 1e-10
    assert largest_difference(on_one_device(looked_up, (table, index)), expected) > 0.1


def used(function, arguments) -> set[str]:
    def names(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn.primitive.name
            for inner in jaxprs_in_params(eqn.params):
                yield from names(inner)

    return {*names(jax.make_jaxpr(function)(*arguments).jaxpr)}


def test_every_rule_has_an_operation():
    traced = set().union(*(used(*case) for cases in OPERATIONS.values() for case in cases))
    assert {*RULES} - traced - {*INDIRECT} == set()
