"""Plans as tables: what they compute, and the simulator's errors for faulty ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshpar.collectives.algorithms import algorithms, operations, plan
from meshpar.collectives.plan import OPERATIONS, Permute
from meshpar.collectives.select import seconds, select
from meshpar.collectives.simulate import check, simulate
from meshpar.errors import ConfigError, PlanError
from meshpar.mesh.hardware import LINKS, Link
from tests.collectives.cases import PAIRS, ROOTED, reference


@pytest.mark.parametrize(("operation", "algorithm"), PAIRS)
def test_every_plan_computes_its_operation(operation, algorithm):
    for num_ranks in range(1, 10):
        for root in range(num_ranks) if operation in ROOTED else [0]:
            table = plan(operation, algorithm, num_ranks, root)
            check(table)
            check(table.transposed)


@pytest.mark.parametrize(("operation", "algorithm"), PAIRS)
def test_the_simulator_agrees_with_lists_of_blocks(operation, algorithm):
    table = plan(operation, algorithm, 5, 3 if operation in ROOTED else 0)
    inputs = np.random.default_rng(0).integers(0, 99, (5, table.input_slots.shape[1], 2))
    expected = reference(operation, list(inputs), table.root)
    np.testing.assert_array_equal(simulate(table, inputs), np.stack(expected))


def test_every_operation_has_three_algorithms_and_another_is_an_error():
    assert all(len(algorithms(operation)) >= 3 for operation in OPERATIONS)
    assert operations("ring") == OPERATIONS
    with pytest.raises(
        ConfigError,
        match="algorithm tree has no plan for all_gather; use one of ring, bidirectional_ring, halving_doubling",
    ):
        plan("all_gather", "tree", 4)


# Faults -----------------------------------------------------------------------------------------------------------


def faulty(operation, algorithm="ring", *, change):
    table = plan(operation, algorithm, 4)
    return replace(table, rounds=tuple(change(list(table.rounds))))


def one_message(source, target, chunk):
    return (Permute(np.array([source]), np.array([target]), np.array([[chunk]])),)


def without_source(permute, rank):
    stay = permute.source != rank
    return (replace(permute, source=permute.source[stay], target=permute.target[stay], chunks=permute.chunks[stay]),)


SWAP = (Permute(np.array([0, 1]), np.array([1, 0]), np.array([[2], [2]])),)
FAULTS = {
    "a round is missing": (
        faulty("all_gather", change=lambda rounds: rounds[:-1]),
        ["loses a chunk:", "rank 0, block 1", "chunk 1 did not arrive in 2 rounds"],
    ),
    "a chunk comes later than it is sent": (
        faulty("all_gather", change=lambda rounds: [rounds[1], rounds[0], rounds[2]]),
        [
            "deadlocks:",
            "round 0, rank 0",
            "should send chunk 3 to rank 1, but receives it only in round 1: both wait for ever",
        ],
    ),
    "two wait for each other": (
        faulty("all_gather", change=lambda rounds: [SWAP, *rounds]),
        [
            "deadlocks:",
            "round 0, rank 1",
            "should send chunk 2 to rank 0, but receives it only in round 0: both wait for ever",
        ],
    ),
    "a rank sends a chunk that it does not hold": (
        faulty("scatter", change=lambda rounds: [one_message(3, 0, 1)]),
        ["deadlocks:", "round 0, rank 3", "should send chunk 1 to rank 0, but does not hold it"],
    ),
    "a sum is overwritten": (
        faulty("reduce_scatter", change=lambda rounds: [(replace(rounds[0][0], adds=False),), *rounds[1:]]),
        ["loses a chunk:", "round 0, rank 1", "chunk 3 from rank 2 overwrites a chunk"],
    ),
    "a chunk is added to an empty slot": (
        faulty("all_gather", change=lambda rounds: [(replace(rounds[0][0], adds=True),), *rounds[1:]]),
        ["loses a chunk:", "round 0, rank 1", "chunk 0 from rank 0 is added to an empty slot"],
    ),
    "a part is counted twice": (
        faulty("all_reduce", "recursive_doubling", change=lambda rounds: [rounds[0], *rounds]),
        ["no all_reduce:", "rank 0, block 0", "block 0 of rank 0 is counted twice"],
    ),
    "rank 1 leaves the exchange of round 1": (
        faulty("all_reduce", "recursive_doubling", change=lambda r: [r[0], without_source(r[1][0], 1)]),
        ["no all_reduce:", "rank 3, block 0", "block 0 of rank 0 is lost; it moved last in round 1, to rank 2"],
    ),
    "two messages to one rank": (
        faulty("all_gather", change=lambda r: [(Permute(np.array([0, 1]), np.array([2, 2]), np.array([[0], [1]])),)]),
        ["deadlocks:", "round 0, rank 2", "receives two messages in one permute"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulator_names_round_and_rank_of_a_fault(fault):
    broken, words = FAULTS[fault]
    with pytest.raises(PlanError) as raised:
        check(broken)
    assert all(word in str(raised.value) for word in words), raised.value


# Selection --------------------------------------------------------------------------------------------------------


def test_the_time_on_a_torus_equals_the_sum_by_hand():
    """8 ranks, 1 s a hop, 8 bytes a second: a message to rank + 4 passes 4 links, and each link carries 4 of them."""
    link = Link(8.0, 1.0, torus=True)
    num_bytes = 64
    assert seconds(plan("all_gather", "ring", 8), num_bytes, link) == 7 * (1 + 1)
    assert seconds(plan("all_gather", "bidirectional_ring", 8), num_bytes, link) == 4 * (1 + 1)
    assert seconds(plan("all_gather", "halving_doubling", 8), num_bytes, link) == (1 + 1) + (2 + 2 * 2) + (4 + 4 * 4)


def test_the_time_on_a_switch_equals_the_sum_by_hand():
    """A device sends both directions of a round over its one link."""
    link = Link(8.0, 1.0)
    num_bytes = 64
    assert seconds(plan("all_gather", "ring", 8), num_bytes, link) == 7 * (1 + 1)
    assert seconds(plan("all_gather", "bidirectional_ring", 8), num_bytes, link) == 3 * (1 + 2) + (1 + 1)
    assert seconds(plan("all_gather", "halving_doubling", 8), num_bytes, link) == 3 + 7


@pytest.mark.parametrize(
    ("chip", "num_bytes", "chosen"),
    [
        ("H100 SXM", 1 << 10, "recursive_doubling"),
        ("H100 SXM", 1 << 30, "halving_doubling"),
        ("TPU v5e", 1 << 10, "recursive_doubling"),
        ("TPU v5e", 1 << 30, "bidirectional_ring"),
    ],
)
def test_a_small_array_gets_few_rounds_and_a_large_one_few_bytes_a_link(chip, num_bytes, chosen):
    assert select("all_reduce", 16, num_bytes, LINKS[chip].inside) == chosen


def test_the_selected_algorithm_is_the_fastest():
    link = LINKS["H100 SXM"].across
    for operation in OPERATIONS:
        times = {name: seconds(plan(operation, name, 6), 1 << 20, link) for name in algorithms(operation)}
        assert times[select(operation, 6, 1 << 20, link)] == min(times.values())


def test_without_a_known_link_the_fewest_bytes_win_and_then_the_fewest_rounds():
    assert select("all_reduce", 8, 1 << 10) == "halving_doubling"
    for operation in OPERATIONS:
        plans = {name: plan(operation, name, 7) for name in algorithms(operation)}
        costs = {name: (int(one.sent_chunks.max()) / one.num_chunks, one.num_rounds) for name, one in plans.items()}
        assert costs[select(operation, 7, 1)] == min(costs.values())
