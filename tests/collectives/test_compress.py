"""Compressed sums: their error, error feedback, and what they send."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from meshpar import ShardingError, collectives
from meshpar.collectives import Float8, Int8, OneBit, PowerSGD
from meshpar.cost.traced import traced_collectives, traffic
from meshpar.inspection.program.hlo import collectives_of, total_sent_bytes
from tests.collectives import oracle

N = 4
AXIS = "data"
CODES = {
    "int8": Int8(),
    "int8_stochastic": Int8(rounding="stochastic"),
    "fp8": Float8(),
    "fp8_stochastic": Float8(rounding="stochastic"),
    "onebit": OneBit(block=64),
    "powersgd": PowerSGD(rank=2),
}
WHOLE = P()
PARTS = P(AXIS)


def on(body, out=WHOLE):
    mesh = jax.make_mesh((N,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:N])
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=PARTS, out_specs=out))


def arrays(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((N, *shape)), jnp.float32)


def summed(code, x, num_steps=1):
    """The mean over steps of compressed sums of the same x, where each step gets the state of the last."""

    def body(x):
        def step(state, number):
            total, state = code.all_reduce(x[0], AXIS, state, key=jax.random.key(number))
            return state, total

        state, first = step(None, 0)
        _, others = lax.scan(step, state, jnp.arange(1, num_steps))
        return (first + others.sum(0)) / num_steps

    return np.asarray(on(body)(x))


def error(code, x, num_steps=1) -> float:
    exact = np.asarray(x, "float64").sum(0)
    return float(np.linalg.norm(summed(code, x, num_steps) - exact) / np.linalg.norm(exact))


# The largest element of a block of Gaussians is about 2.8: an int8 step is 2.8/127, and its error 1/sqrt(12) of that.
BOUNDS = {"int8": 0.011, "int8_stochastic": 0.02, "fp8": 0.05, "fp8_stochastic": 0.1, "onebit": 1.0, "powersgd": 1.0}


@pytest.mark.parametrize("name", CODES)
def test_the_error_of_a_compressed_sum_is_that_of_its_rounding(name):
    assert error(CODES[name], arrays(37, 21)) < BOUNDS[name]


@pytest.mark.parametrize(("name", "left"), [("int8", 0.1), ("fp8", 0.1), ("onebit", 0.4)])
def test_error_feedback_makes_the_mean_of_many_sums_more_exact(name, left):
    """One array is summed 16 times: each step adds what the last one lost, so the error of the mean falls as 1/T."""
    x = arrays(500)
    with_, without = (CODES[name].model_copy(update={"error_feedback": feedback}) for feedback in (True, False))
    assert error(with_, x, 16) < left * error(without, x, 16)


def test_powersgds_error_vanishes_for_a_matrix_of_its_rank():
    x = jnp.einsum("ni,nj->nij", arrays(24, seed=1), arrays(24, seed=2))  # the sum has rank 4
    assert error(PowerSGD(rank=4), x, 1) < 1e-4
    assert error(PowerSGD(rank=1, error_feedback=False), x, 8) > 0.2


def test_stochastic_rounding_is_unbiased():
    x = jnp.full((N, 1 << 16), 0.3).at[:, ::256].set(1.0)

    def bias(code):
        return abs(np.delete(summed(code, x), np.s_[::256]).mean() - N * 0.3)

    assert bias(Int8(rounding="stochastic")) < 1e-3 < bias(Int8())
    assert bias(Float8(rounding="stochastic")) < 1e-3 < bias(Float8())
    without_key = on(lambda x: Int8(rounding="stochastic").all_reduce(x, AXIS)[0])
    with pytest.raises(TypeError, match="needs a key"):
        without_key.lower(x)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_coded_reduce_scatter_and_all_gather_are_exact_up_to_rounding(name):
    code = CODES[name]
    x = arrays(8, 33)
    scattered = on(lambda x: code.reduce_scatter(x[0], AXIS), PARTS)(x)
    np.testing.assert_allclose(scattered, x.sum(0), atol=0.3)
    gathered = on(lambda x: code.all_gather(x[0], AXIS)[None], PARTS)(x)
    for rank in range(N):
        np.testing.assert_allclose(gathered[rank], x.reshape(-1, 33), atol=0.15)


@pytest.mark.parametrize("name", ["int8", "fp8", "onebit", "powersgd"])
def test_the_sum_of_an_element_that_is_not_finite_is_not_finite(name):
    for bad in (jnp.nan, jnp.inf):
        assert not np.isfinite(summed(CODES[name], arrays(600).at[1, 3].set(bad))).all()


@pytest.mark.parametrize("name", CODES)
def test_integers_are_refused(name):
    program = on(lambda x: CODES[name].all_reduce(x, AXIS)[0])
    with pytest.raises(ShardingError, match=r"int32\[1, 8\] cannot be compressed"):
        program.lower(jnp.ones((N, 8), jnp.int32))


def sent(body, size) -> float:
    """Bytes of the compiled program, which are those of the traced one."""
    traced = on(lambda x: body(x[0])).trace(jnp.ones((N, size)))
    compiled = total_sent_bytes(collectives_of(traced.lower().compile()))
    assert compiled == sum(traffic(traced_collectives(traced.jaxpr, float_bytes=4)).values())
    return float(compiled)


def closed_form(code, size) -> int:
    return sum(oracle.sent(oracle.all_reduce_messages(code, (size,), N), (AXIS,), {AXIS: N}).values())


@pytest.mark.parametrize(("name", "size"), [*((name, 4000) for name in CODES), ("int8", 999), ("powersgd", 3)])
def test_the_traced_and_the_compiled_program_send_the_closed_form(name, size):
    code = CODES[name]
    assert sent(lambda x: code.all_reduce(x, AXIS, key=jax.random.key(0))[0], size) == closed_form(code, size)


def test_control_another_block_size_sends_other_bytes():
    assert sent(lambda x: Int8(block=64).all_reduce(x, AXIS)[0], 4000) != closed_form(Int8(), 4000)
    assert sent(lambda x: OneBit(block=64).all_reduce(x, AXIS)[0], 4000) != closed_form(Int8(block=64), 4000)


def test_int8_sends_at_most_52_percent_of_bfloat16():
    size = 1 << 16
    bfloat16 = sent(lambda x: collectives.all_reduce(x, AXIS), size) / 2  # XLA may widen 16 bits on a CPU: half of 32
    compressed = sent(lambda x: Int8().all_reduce(x, AXIS)[0], size)
    assert compressed / bfloat16 == 130 / 128 / 2
    assert compressed <= 0.52 * bfloat16
    assert sent(lambda x: Int8(block=64).all_reduce(x, AXIS)[0], size) > 0.52 * bfloat16
