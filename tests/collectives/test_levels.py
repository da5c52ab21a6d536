"""Sums over several levels of the network, and the ragged all-to-all."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from meshpar.collectives import hierarchical_all_reduce
from meshpar.collectives.ragged import ragged_all_to_all
from meshpar.inspection.program.hlo import collectives_of, total_sent_bytes

WHOLE = P()


def levels_mesh():
    return jax.make_mesh((2, 2, 2), ("pod", "slice", "chip"), axis_types=(AxisType.Auto,) * 3)


def program(levels, axes=("pod", "slice", "chip")):
    def body(x):
        return hierarchical_all_reduce(x[0], levels)

    return jax.jit(jax.shard_map(body, mesh=levels_mesh(), in_specs=P(axes), out_specs=WHOLE))


TWO = (("slice", "chip"), "pod")
THREE = ("chip", "slice", "pod")


@pytest.mark.parametrize("levels", [TWO, THREE], ids=["two", "three"])
def test_a_sum_over_levels_and_its_gradient_are_exact(levels):
    x = jnp.arange(8 * 15.0).reshape(8, 5, 3)
    np.testing.assert_array_equal(program(levels)(x), x.sum(0))
    grad = jax.grad(lambda x: (program(levels)(x) ** 2).sum())(x)
    np.testing.assert_array_equal(grad, jnp.broadcast_to(2 * x.sum(0), x.shape))


def test_a_sum_over_levels_sends_the_closed_form_inside_and_across():
    """g = 4 chips of two axes inside, k = 2 across: 2(g-1)/g S, and 2(k-1)/k S/g."""
    mesh = levels_mesh()
    num_bytes = 4 * 1024
    found = collectives_of(program(TWO).lower(jnp.ones((8, 1024))).compile(), mesh)
    across = total_sent_bytes(found, axes=("pod",))
    assert across == 2 * Fraction(1, 2) * num_bytes / 4
    assert total_sent_bytes(found) - across == 2 * Fraction(3, 4) * num_bytes
    flat = collectives_of(program((("pod", "slice", "chip"),)).lower(jnp.ones((8, 1024))).compile(), mesh)
    crossing = sum(collective.times * collective.sent_bytes for collective in flat if "pod" in collective.axes)
    assert crossing > 2 * across, "a ring over all of them sends more across"


# Ragged -----------------------------------------------------------------------------------------------------------

RANKS = 4
ROWS = 20


def sizes(seed):
    """int[from, to]: how many rows each rank sends to each, sometimes none."""
    return np.random.default_rng(seed).integers(0, 5, (RANKS, RANKS))


def ragged(call, operand, output, sent):
    """Each rank's operand is ordered by the targets of its rows, its output by the sources of its rows."""
    received = sent.T
    tables = [np.cumsum(sent, 1) - sent, sent, (np.cumsum(received, 1) - received).T, received]
    mesh = jax.make_mesh((RANKS,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:RANKS])

    def body(operand, output, *tables):
        return call(operand[0], output[0], *(table[0] for table in tables), axes="a")[None]

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P("a")))
    return lambda operand, output: run(operand, output, *(jnp.asarray(table, jnp.int32) for table in tables))


def expected(operand, output, sent):
    output = np.array(output)
    for to in range(RANKS):
        rows = [operand[rank, sent[rank, :to].sum() : sent[rank, : to + 1].sum()] for rank in range(RANKS)]
        rows = np.concatenate(rows)
        output[to, : len(rows)] = rows
    return output


@pytest.mark.parametrize("seed", range(3))
def test_ragged_rows_arrive_and_the_rest_of_the_output_stays(seed):
    sent = sizes(seed)
    operand, output = np.random.default_rng(seed).standard_normal((2, RANKS, ROWS, 2)).astype("f")
    run = ragged(ragged_all_to_all, operand, output, sent)
    np.testing.assert_array_equal(run(operand, output), expected(operand, output, sent))


def test_the_gradient_of_a_ragged_exchange_returns_rows_to_their_sources():
    sent = sizes(0)
    operand, output = jnp.ones((2, RANKS, ROWS, 2))
    weights = np.random.default_rng(1).standard_normal((RANKS, ROWS, 2)).astype("f")
    run = ragged(ragged_all_to_all, operand, output, sent)
    to_operand, to_output = jax.grad(lambda *x: (run(*x) * weights).sum(), argnums=(0, 1))(operand, output)
    back = np.zeros_like(weights)
    for to in range(RANKS):
        rows = np.split(weights[to, : sent[:, to].sum()], np.cumsum(sent[:, to])[:-1])
        for rank in range(RANKS):
            start = sent[rank, :to].sum()
            back[rank, start : start + sent[rank, to]] = rows[rank]
    np.testing.assert_allclose(to_operand, back, rtol=1e-6)
    untouched = np.arange(ROWS)[None, :, None] >= sent.sum(0)[:, None, None]
    np.testing.assert_allclose(to_output, np.where(untouched, weights, 0))


def test_only_a_backend_with_a_ragged_all_to_all_gets_it():
    """The program for a GPU holds XLA's operation, that for a CPU does not."""
    sent = sizes(0)
    mesh = jax.make_mesh((RANKS,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:RANKS])

    def body(x, t):
        return ragged_all_to_all(x[0], x[0], t[0], t[0], t[0], t[0], axes="a")[None]

    traced = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P("a"))).trace(
        jnp.ones((RANKS, ROWS)), jnp.asarray(sent, jnp.int32)
    )
    text = {platform: traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "cuda")}
    assert "ragged_all_to_all" in text["cuda"]
    assert "ragged_all_to_all" not in text["cpu"]
