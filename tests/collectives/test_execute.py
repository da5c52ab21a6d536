"""The executor: equal to lists of blocks in NumPy, forward and transpose; its errors; its cost."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from meshpar import MeshError, ShardingError, collectives
from tests.collectives.cases import PAIRS, ROOTED, Case, check, compare, sweep
from tests.collectives.ratio import ratio

AUTO = jax.sharding.AxisType.Auto


@pytest.mark.sample(15)
@pytest.mark.parametrize(("operation", "algorithm"), PAIRS)
def test_each_algorithm_and_its_transpose_equal_the_reference(operation, algorithm):
    check(Case(operation, algorithm, (5,), ("a",), "float32", (3, 2), 2 if operation in ROOTED else 0))


def test_a_sample_of_groups_axes_dtypes_and_shapes_equals_the_reference():
    sweep(20)


@pytest.mark.slow
def test_every_algorithm_on_every_number_of_devices_equals_the_reference():
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "9", "JAX_NUMPY_DTYPE_PROMOTION": "strict"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.collectives.cases"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_control_a_wrong_result_is_seen():
    x = np.arange(12.0).reshape(3, 4)
    compare(Case("all_reduce", "ring", (3,), ("a",), "float32", (4,)), "all_reduce", x, np.tile(x.sum(0), (3, 1)))
    with pytest.raises(AssertionError, match="all_reduce, rank 0"):
        compare(Case("all_reduce", "ring", (3,), ("a",), "float32", (4,)), "all_reduce", x, x)


WHOLE = P()
PARTS = P("a")


def on(num: int, body, x, out=WHOLE):
    mesh = jax.make_mesh((num,), ("a",), axis_types=(AUTO,), devices=jax.devices()[:num])
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=PARTS, out_specs=out)).lower(x)


@pytest.mark.parametrize(("operation", "algorithm"), PAIRS)
def test_a_group_of_one_compiles_to_nothing(operation, algorithm):
    call = getattr(collectives, operation)
    lowered = on(1, lambda x: call(x, "a", algorithm=algorithm), jnp.ones((4, 3)), PARTS)
    text = lowered.compile().as_text()
    assert {line.split(" = ")[1].split(" ")[1].split("(")[0] for line in text.splitlines() if " = " in line} <= {
        "parameter", "copy", "bitcast",
    }, text  # fmt: skip


def test_a_sum_is_typed_as_replicated_and_a_gathered_array_as_varying():
    on(4, lambda x: collectives.all_reduce(x, "a", algorithm="tree"), jnp.ones((4, 3)))
    with pytest.raises(ValueError, match="out_specs"):
        on(4, lambda x: collectives.all_gather(x, "a", algorithm="ring"), jnp.ones((4, 3)))


def test_the_gradient_of_a_sum_equals_that_of_psum():
    """The loss is replicated: a missing or doubled reduction would change the gradient by a factor of 4."""

    def gradient(psum):
        def body(x):
            return (psum(x * x, "a") ** 2).sum()

        mesh = jax.make_mesh((4,), ("a",), axis_types=(AUTO,), devices=jax.devices()[:4])
        return jax.jit(jax.grad(jax.shard_map(body, mesh=mesh, in_specs=PARTS, out_specs=WHOLE)))(jnp.arange(8.0))

    def copied(x, axes):
        return collectives.broadcast(lax.psum(x, axes), axes, root=2)

    for psum in (collectives.all_reduce, copied):
        np.testing.assert_array_equal(gradient(psum), gradient(lax.psum))


@pytest.mark.parametrize("axes", ["b", ("a", "b"), "aa"])
def test_an_axis_that_is_not_manual_is_an_error(axes):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AUTO, AUTO))
    manual = {"in_specs": PARTS, "out_specs": WHOLE, "axis_names": {"a"}}
    program = jax.jit(jax.shard_map(lambda x: collectives.all_reduce(x, axes), mesh=mesh, **manual))
    with pytest.raises(MeshError, match=r"is not manual: (did you mean a\? )?manual here are a; call this within"):
        program.lower(jnp.ones((8, 8)))
    with pytest.raises(MeshError, match="axis 'a' is not manual: no axis is manual here"):
        collectives.all_reduce(jnp.ones(3), "a")


def test_a_dim_or_a_plan_that_does_not_fit_the_group_is_an_error():
    with pytest.raises(ShardingError, match=r"reduce_scatter of float32\[3, 5\]: dim 1 = 5 is not divisible by 4"):
        on(4, lambda x: collectives.reduce_scatter(x, "a", dim=1), jnp.ones((12, 5)))
    with pytest.raises(MeshError, match="a plan for 3 ranks cannot run over a of 4 devices"):
        on(4, lambda x: collectives.execute(collectives.plan("all_gather", "ring", 3), x[None], "a"), jnp.ones(4))


@pytest.mark.slow
def test_the_executor_is_at_most_5_percent_slower_than_a_ring_by_hand():
    assert ratio(1 << 18, 40) <= 1.05
