"""The simulator: what a plan does, in NumPy, and where it goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from meshpar.collectives.plan import NONE, Plan, Round
from meshpar.errors import PlanError, Problems


def simulate(plan: Plan, inputs: np.ndarray) -> np.ndarray:
    """What each rank has in the end.

    Args:
      inputs: [num_ranks, blocks, ...]. Of each rank, block by block.

    Returns:
      [num_ranks, blocks, ...]; zeros where a rank gets nothing, as all but the root of a reduction.

    Raises:
      PlanError: lists what is wrong with the first round that cannot run, or with the end: the rounds and the ranks.

    >>> from meshpar.collectives.algorithms import plan
    >>> simulate(plan("all_reduce", "ring", 3), np.arange(9).reshape(3, 3))
    array([[ 9, 12, 15],
           [ 9, 12, 15],
           [ 9, 12, 15]])
    """
    slots, held = _begin(plan, inputs)
    for _ in _run(plan, slots, held):
        pass
    _require_taken(plan, held)
    taken = slots[np.arange(plan.num_ranks)[:, None], plan.taken]
    return np.where((plan.taken == NONE).reshape(*plan.taken.shape, *[1] * (taken.ndim - 2)), 0, taken)


def check(plan: Plan) -> None:
    """Proves a plan: every output block is made of exactly the parts that its operation says.

    Each block of each rank's input gets a mark of its own, so that the cost grows as the fourth power of the group: up
    to about 64 ranks.

    Raises:
      PlanError: as `simulate`; or a part is lost, or counted twice, and in which round it moved last.
    """
    num_ranks, num_given = plan.given.shape
    marks = np.eye(num_ranks * num_given, dtype=np.int16).reshape(num_ranks, num_given, num_ranks, num_given)
    wrong = simulate(plan, marks) - _expected(plan)
    problems = Problems()
    for rank, block, source, part in np.argwhere(wrong)[:10]:
        what = "is counted twice" if wrong[rank, block, source, part] > 0 else "is lost"
        _, moved, at = max(_moves(plan, marks, source, part), default=(0, "never", source))
        what = f"block {part} of rank {source} {what}; it moved last in {moved}, to rank {at}"
        problems.add(f"rank {rank}, block {block}", what)
    problems.raise_any(PlanError, f"the plan is no {plan.operation}:")


def _begin(plan: Plan, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    slots = np.zeros((plan.num_ranks, plan.num_chunks, *inputs.shape[2:]), inputs.dtype)
    held = np.zeros(slots.shape[:2], bool)
    rank, block = np.nonzero(plan.given != NONE)
    at = rank, plan.given[rank, block]
    slots[at], held[at] = inputs[rank, block], True
    return slots, held


def _run(plan: Plan, slots: np.ndarray, held: np.ndarray) -> Iterator[int]:
    """Changes slots round by round, and yields each round's number after it."""
    for number, round_ in enumerate(plan.rounds):
        _require_sendable(plan, number, held)
        messages = [slots[permute.source[:, None], permute.chunks] for permute in round_]
        for permute in round_:
            held[permute.source[:, None], permute.chunks] &= permute.keeps
        _require_landing(number, round_, held)
        for permute, message in zip(round_, messages, strict=True):
            at = permute.target[:, None], permute.chunks
            slots[at] = slots[at] + message if permute.adds else message
            held[at] = True
        yield number


def _require_sendable(plan: Plan, number: int, held: np.ndarray) -> None:
    problems = Problems()
    for permute in plan.rounds[number]:
        for name, ranks in (("sends", permute.source), ("gets", permute.target)):
            for rank in np.flatnonzero(np.bincount(ranks) > 1):
                problems.add(f"round {number}, rank {rank}", f"{name} two messages in one permute", "another permute")
        for i, j in np.argwhere(~held[permute.source[:, None], permute.chunks]):
            source, chunk = permute.source[i], permute.chunks[i, j]
            what = f"is to send chunk {chunk} to rank {permute.target[i]}, but {_arrival(plan, number, source, chunk)}"
            problems.add(f"round {number}, rank {source}", what)
    problems.raise_any(PlanError, "the plan deadlocks:")


def _arrival(plan: Plan, number: int, rank: Any, chunk: Any) -> str:
    """Why a rank waits."""
    for later in range(number, plan.num_rounds):
        if any((permute.chunks[permute.target == rank] == chunk).any() for permute in plan.rounds[later]):
            return f"gets it only in round {later}: both wait for ever"
    return "does not have it: rank and target wait for ever"


def _require_landing(number: int, round_: Round, held: np.ndarray) -> None:
    problems = Problems()
    for permute in round_:
        for i, j in np.argwhere(held[permute.target[:, None], permute.chunks] != permute.adds):
            target, chunk = permute.target[i], permute.chunks[i, j]
            what = "adds to a chunk that is not there" if permute.adds else "overwrites a chunk"
            problems.add(f"round {number}, rank {target}", f"chunk {chunk} from rank {permute.source[i]} {what}")
    problems.raise_any(PlanError, "the plan loses a chunk:")


def _require_taken(plan: Plan, held: np.ndarray) -> None:
    problems = Problems()
    there = held[np.arange(plan.num_ranks)[:, None], plan.taken] | (plan.taken == NONE)
    for rank, block in np.argwhere(~there):
        what = f"chunk {plan.taken[rank, block]} did not reach it in {plan.num_rounds} rounds"
        problems.add(f"rank {rank}, block {block}", what)
    problems.raise_any(PlanError, "the plan loses a chunk:")


def _expected(plan: Plan) -> np.ndarray:
    """int[n, blocks, n, blocks of the input]: how often each part belongs in an output block."""
    n, blocks, given = plan.num_ranks, plan.taken.shape[1], plan.given.shape[1]
    one = lambda parts, whole: np.equal.outer(np.asarray(parts), np.arange(whole))
    every, mine = np.ones((n, blocks, n), bool), np.arange(n)[:, None] * blocks + np.arange(blocks)
    same = np.broadcast_to(np.arange(blocks), (n, blocks))
    root, sender = one(np.full((n, blocks), plan.root), n), one(same // given, n)
    pieces = max(1, blocks // n)
    sources, parts = {
        "broadcast": (root, same),
        "scatter": (root, mine),
        "gather": (sender, same % given),
        "reduce": (every, same),
        "all_gather": (sender, same % given),
        "reduce_scatter": (every, mine),
        "all_reduce": (every, same),
        "all_to_all": (one(same // pieces, n), np.arange(n)[:, None] * pieces + same % pieces),
    }[plan.operation]
    expected = sources[..., :, None] & one(parts, given)[..., None, :]
    if plan.operation in ("gather", "reduce"):
        expected = expected & (np.arange(n) == plan.root).reshape(-1, 1, 1, 1)
    return expected.astype(np.int16)


def _moves(plan: Plan, marks: np.ndarray, source: int, part: int) -> Iterator[tuple[int, str, int]]:
    """(round, its name, rank) of each arrival of a part at a rank."""
    slots, held = _begin(plan, marks)
    has = lambda: (slots[..., source, part] != 0).any(1)
    before = has()
    for number in _run(plan, slots, held):
        for rank in np.flatnonzero(has() & ~before):
            yield number, f"round {number}", int(rank)
        before = has()
