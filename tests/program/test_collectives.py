"""Compiled collectives send the bytes of their plans, rank by rank, and plans have the bytes of the textbooks."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from meshpar import collectives
from meshpar.collectives.plan import Plan
from meshpar.inspection.program.hlo import collectives_of
from tests.collectives.cases import PAIRS

CHUNK = 24
"""Floats of a chunk."""


def compiled(plan: Plan, axes: str | tuple[str, ...] = "a"):
    shape, names = ((plan.num_ranks,), ("a",)) if axes == "a" else ((2, plan.num_ranks // 2), ("a", "b"))
    mesh = jax.make_mesh(
        shape, names, axis_types=(AxisType.Auto,) * len(names), devices=jax.devices()[: plan.num_ranks]
    )

    def body(x):
        return collectives.execute(plan, x[0], axes)[None]

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(names), out_specs=P(names)))
    return collectives_of(program.lower(jnp.ones((plan.num_ranks, plan.input_slots.shape[1], CHUNK))).compile())


def sent(plan: Plan, axes: str | tuple[str, ...] = "a") -> tuple[int, dict[int, int]]:
    """The number of permutes that run, and the bytes that each rank sends in them."""
    found = compiled(plan, axes)
    sent_bytes = Counter()
    assert {permute.kind for permute in found} <= {"collective_permute"}
    for permute in found:
        sent_bytes.update({source: permute.times * permute.full_bytes for source, _ in permute.groups})
    return sum(permute.times for permute in found), dict(sent_bytes)


def planned(plan: Plan) -> tuple[int, dict[int, int]]:
    chunks = enumerate(plan.sent_chunks.tolist())
    return len(list(plan.permutes())), {rank: 4 * CHUNK * count for rank, count in chunks if count}


@pytest.mark.parametrize(("operation", "algorithm"), PAIRS)
def test_the_compiled_program_sends_the_bytes_of_its_plan(operation, algorithm):
    plan = collectives.plan(operation, algorithm, 6)
    assert sent(plan) == planned(plan)


def test_the_compiled_program_over_two_axes_sends_the_bytes_of_its_plan():
    plan = collectives.plan("all_reduce", "halving_doubling", 8)
    assert sent(plan, ("b", "a")) == planned(plan)


def test_planted_a_round_that_is_sent_twice_is_seen():
    plan = collectives.plan("reduce_scatter", "ring", 6)
    assert sent(replace(plan, rounds=(*plan.rounds, plan.rounds[0]))) != planned(plan)


def log2(n: int) -> int:
    return math.ceil(math.log2(n))


def ring(n):
    return n - 1, Fraction(n - 1, n)


def both_ways(n):
    return math.ceil((n - 1) / 2), Fraction(n - 1, n)


def doubling(n):
    return log2(n), Fraction(n - 1, n)


def twice(form):
    return lambda n: tuple(2 * x for x in form(n))


CLOSED_FORMS = {
    **{(o, "ring"): ring for o in ("all_gather", "reduce_scatter", "scatter", "gather", "all_to_all")},
    **{(o, "ring"): twice(ring) for o in ("all_reduce", "broadcast", "reduce")},
    **{(o, "bidirectional_ring"): both_ways for o in ("all_gather", "reduce_scatter", "all_to_all", "scatter")},
    ("all_reduce", "bidirectional_ring"): twice(both_ways),
    ("broadcast", "bidirectional_ring"): twice(both_ways),
    **{(o, "halving_doubling"): doubling for o in ("all_gather", "reduce_scatter", "scatter")},
    ("all_reduce", "halving_doubling"): twice(doubling),
    ("broadcast", "halving_doubling"): twice(doubling),
}


@pytest.mark.parametrize(("operation", "algorithm"), CLOSED_FORMS)
def test_rounds_and_bytes_equal_the_textbooks(operation, algorithm):
    """The formulas give (rounds, share of S)."""
    for n in range(2, 20):
        plan = collectives.plan(operation, algorithm, n)
        assert (plan.num_rounds, plan.sent_bytes(1)) == CLOSED_FORMS[operation, algorithm](n), n


def test_rounds_and_bytes_of_powers_of_two_and_of_trees_equal_the_textbooks():
    for n in (2, 4, 8, 16):
        exchange = collectives.plan("all_reduce", "recursive_doubling", n)
        bruck = collectives.plan("all_to_all", "halving_doubling", n)
        assert (exchange.num_rounds, exchange.sent_bytes(1)) == (log2(n), log2(n))
        assert (bruck.num_rounds, bruck.sent_bytes(1)) == (log2(n), Fraction(log2(n), 2))
    for n in range(2, 40):
        tree = collectives.plan("all_reduce", "tree", n)
        assert tree.sent_bytes(1) <= 2
        assert tree.num_rounds <= 4 * log2(n) + 12
