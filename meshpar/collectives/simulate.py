"""Simulates a plan in NumPy, and reports the round and the rank at which it fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from meshpar.collectives.plan import NONE, Plan, Round
from meshpar.errors import PlanError, Problems


def simulate(plan: Plan, inputs: np.ndarray) -> np.ndarray:
    """Runs a plan in NumPy and returns the output of each rank.

    Args:
      inputs: [num_ranks, blocks, ...]. The input blocks of each rank.

    Returns:
      [num_ranks, blocks, ...]; zeros where a rank has no output, such as all but the root of a reduction.

    Raises:
      PlanError: lists the rounds and ranks at fault, in the first round that cannot run or in the final state.

    Examples:
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
    outputs = slots[np.arange(plan.num_ranks)[:, None], plan.output_slots]
    outputs[plan.output_slots == NONE] = 0
    return outputs


def check(plan: Plan) -> None:
    """Proves a plan: every output block consists of exactly the parts that its operation defines.

    Each block of each rank's input gets its own mark, so the cost grows with the fourth power of the group size. It is
    practical up to about 64 ranks.

    Raises:
      PlanError: as `simulate`; or a part is lost or counted twice, with the round in which it moved last.

    >>> from meshpar.collectives.algorithms import plan
    >>> check(plan("all_to_all", "halving_doubling", 5))
    """
    num_ranks, num_blocks = plan.input_slots.shape
    marks = np.eye(num_ranks * num_blocks, dtype=np.int16).reshape(num_ranks, num_blocks, num_ranks, num_blocks)
    wrong = simulate(plan, marks) - _expected(plan, marks)
    problems = Problems()
    for rank, block, source, part in np.argwhere(wrong)[:10]:
        fault = "is counted twice" if wrong[rank, block, source, part] > 0 else "is lost"
        _, moved, at = max(_moves(plan, marks, source, part), default=(0, "never", source))
        what = f"block {part} of rank {source} {fault}; it moved last in {moved}, to rank {at}"
        problems.add(f"rank {rank}, block {block}", what)
    problems.raise_any(PlanError, f"the plan is no {plan.operation}:")


def _begin(plan: Plan, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The slots that hold the inputs, and which slots are filled: bool[n, num_chunks]."""
    slots = np.zeros((plan.num_ranks, plan.num_chunks, *inputs.shape[2:]), inputs.dtype)
    held = np.zeros(slots.shape[:2], bool)
    rank, block = np.nonzero(plan.input_slots != NONE)
    at = rank, plan.input_slots[rank, block]
    slots[at] = inputs[rank, block]
    held[at] = True
    return slots, held


def _run(plan: Plan, slots: np.ndarray, held: np.ndarray) -> Iterator[int]:
    """Updates the slots round by round, and yields each round's number after it."""
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
        for verb, ranks in (("sends", permute.source), ("receives", permute.target)):
            for rank in np.flatnonzero(np.bincount(ranks) > 1):
                problems.add(f"round {number}, rank {rank}", f"{verb} two messages in one permute", "another permute")
        for i, j in np.argwhere(~held[permute.source[:, None], permute.chunks]):
            source = permute.source[i]
            chunk = permute.chunks[i, j]
            what = f"should send chunk {chunk} to rank {permute.target[i]}, but {_arrival(plan, number, source, chunk)}"
            problems.add(f"round {number}, rank {source}", what)
    problems.raise_any(PlanError, "the plan deadlocks:")


def _arrival(plan: Plan, number: int, rank: Any, chunk: Any) -> str:
    """Why a rank does not hold a chunk in a round."""
    for later in range(number, plan.num_rounds):
        if any((permute.chunks[permute.target == rank] == chunk).any() for permute in plan.rounds[later]):
            return f"receives it only in round {later}: both wait for ever"
    return "does not hold it: rank and target wait for ever"


def _require_landing(number: int, round_: Round, held: np.ndarray) -> None:
    problems = Problems()
    for permute in round_:
        for i, j in np.argwhere(held[permute.target[:, None], permute.chunks] != permute.adds):
            what = "is added to an empty slot" if permute.adds else "overwrites a chunk"
            what = f"chunk {permute.chunks[i, j]} from rank {permute.source[i]} {what}"
            problems.add(f"round {number}, rank {permute.target[i]}", what)
    problems.raise_any(PlanError, "the plan loses a chunk:")


def _require_taken(plan: Plan, held: np.ndarray) -> None:
    problems = Problems()
    there = held[np.arange(plan.num_ranks)[:, None], plan.output_slots] | (plan.output_slots == NONE)
    for rank, block in np.argwhere(~there):
        what = f"chunk {plan.output_slots[rank, block]} did not arrive in {plan.num_rounds} rounds"
        problems.add(f"rank {rank}, block {block}", what)
    problems.raise_any(PlanError, "the plan loses a chunk:")


def _expected(plan: Plan, inputs: np.ndarray) -> np.ndarray:
    """[num_ranks, blocks, ...]. The operation's output by definition, without its rounds."""
    n = plan.num_ranks
    block_shape = inputs.shape[2:]
    match plan.operation:
        case "all_to_all":
            return inputs.reshape(n, n, -1, *block_shape).swapaxes(0, 1).reshape(inputs.shape)
        case "broadcast" | "scatter":
            whole = inputs[plan.root]
        case "all_gather" | "gather":
            whole = inputs.reshape(-1, *block_shape)
        case _:
            whole = inputs.sum(0, dtype=inputs.dtype)
    if plan.operation in ("scatter", "reduce_scatter"):
        return whole.reshape(n, -1, *block_shape)
    expected = np.stack([whole] * n)
    if plan.operation in ("gather", "reduce"):
        expected[np.arange(n) != plan.root] = 0
    return expected


def _moves(plan: Plan, marks: np.ndarray, source: int, part: int) -> Iterator[tuple[int, str, int]]:
    """(round, its name, rank) of each arrival of a part at a rank."""
    slots, held = _begin(plan, marks)
    marked = slots[..., source, part]  # a view, so it changes with the slots
    before = marked.any(1)
    for number in _run(plan, slots, held):
        now = marked.any(1)
        for rank in np.flatnonzero(now & ~before):
            yield number, f"round {number}", int(rank)
        before = now
