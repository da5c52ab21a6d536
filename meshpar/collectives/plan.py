"""Plans: a collective algorithm as a table of messages: source, target, chunks, and whether chunks are added or copied.

A buffer of S bytes is split into chunks. Each rank of a group has a slot for every chunk. In a round, messages carry
chunks from slots of their source to the same slots of their target. A message either *adds* to the target's slot or
fills an empty one, and its source either *keeps* the chunk or gives it up:

| | source keeps | source gives up |
|---|---|---|
| **target fills** | copy | move |
| **target adds** | exchange | reduce |

As a matrix on the two slots, a message is `[[keeps, 0], [1, adds]]`. The transpose sends the other way, with `adds` and
`keeps` swapped. So the transpose of a plan, which is its derivative, is the table read backwards: a reduce-scatter is
the transpose of an all-gather, a gather of a scatter, a reduction of a broadcast.

The simulator, the executor, the choice of an algorithm, and the formulas in the tests all read these tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Literal, get_args

import numpy as np

Operation = Literal[
    "broadcast", "scatter", "gather", "reduce", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"
]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
TRANSPOSED: dict[Operation, Operation] = {
    "broadcast": "reduce", "reduce": "broadcast", "scatter": "gather", "gather": "scatter",
    "all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
}  # fmt: skip
NONE = -1
"""Stands for "no slot" in a table of slots."""


@dataclass(frozen=True, eq=False)
class Permute:
    """Messages that are sent as one permute: all have one size, and no two have the same source or target.

    Args:
      source: int[m]. The sending ranks.
      target: int[m]. The receiving ranks.
      chunks: int[m, c]. The chunks of each message.
      adds: whether the target adds the chunks to its own; otherwise they fill its empty slots.
      keeps: whether the source keeps the chunks; otherwise its slots are empty afterwards.

    >>> swap = Permute(np.array([0, 1]), np.array([1, 0]), np.array([[0], [0]]), adds=True)
    >>> swap.transposed.target.tolist()
    [0, 1]
    """

    source: np.ndarray
    target: np.ndarray
    chunks: np.ndarray
    adds: bool = False
    keeps: bool = True

    @cached_property
    def transposed(self) -> Permute:
        return replace(self, source=self.target, target=self.source, adds=self.keeps, keeps=self.adds)


Round = tuple[Permute, ...]
"""Permutes that run at the same time: all slots are read before any slot is written."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The table of an algorithm for a group of ranks; `str` prints it.

    Args:
      operation: the collective that the plan computes.
      num_ranks: n, the size of the group.
      num_chunks: the number of chunks of the buffer of S bytes, and of slots of each rank.
      rounds: the messages, in order.
      input_slots: int[n, blocks]. The slot of each block of a rank's input; NONE if the block is not used.
      output_slots: int[n, blocks]. The slot of each block of a rank's output; NONE for zeros.
      root: the root of a broadcast, scatter, gather or reduction.
    """

    operation: Operation
    num_ranks: int
    num_chunks: int
    rounds: tuple[Round, ...]
    input_slots: np.ndarray
    output_slots: np.ndarray
    root: int = 0

    @property
    def num_rounds(self) -> int:
        return len(self.rounds)

    @cached_property
    def sent_chunks(self) -> np.ndarray:
        """int[n]. The number of chunks that each rank sends."""
        sent = np.zeros(self.num_ranks, int)
        for permute in self.permutes():
            sent[permute.source] += permute.chunks.shape[1]
        return sent

    def sent_bytes(self, num_bytes: int) -> Fraction:
        """Bytes that the busiest rank sends for a buffer of S = `num_bytes`, before padding."""
        return Fraction(int(self.sent_chunks.max()), self.num_chunks) * num_bytes

    def permutes(self) -> Iterable[Permute]:
        return (permute for round_ in self.rounds for permute in round_)

    @cached_property
    def transposed(self) -> Plan:
        """The plan of the derivative: it sends each cotangent back to the source of its value, and sums there."""
        rounds = tuple(tuple(permute.transposed for permute in round_) for round_ in reversed(self.rounds))
        slots = {"input_slots": self.output_slots, "output_slots": self.input_slots}
        return replace(self, operation=TRANSPOSED[self.operation], rounds=rounds, **slots)

    def then(self, second: Plan, operation: Operation) -> Plan:
        """This plan followed by a second, whose input slots are this plan's output slots."""
        fits = np.array_equal(self.output_slots, second.input_slots)
        assert fits, "the second plan's input is not the first plan's output"
        rounds = self.rounds + second.rounds
        return replace(self, operation=operation, rounds=rounds, output_slots=second.output_slots)

    def __str__(self) -> str:
        """One line per round, with `source->target chunks` for each message; `+` marks chunks that are added.

        >>> from meshpar.collectives.algorithms import plan
        >>> print(plan("reduce_scatter", "ring", 3))
        reduce_scatter of 3 chunks on 3 ranks
        0   1->0 +2   2->1 +0   0->2 +1
        1   1->0 +0   2->1 +1   0->2 +2
        """
        head = f"{self.operation} of {self.num_chunks} chunks on {self.num_ranks} ranks"
        return "\n".join([head, *(_line(i, round_) for i, round_ in enumerate(self.rounds))])


def _line(number: int, round_: Round) -> str:
    words = [f"{number:<3}"]
    for permute in round_:
        for source, target, chunks in zip(permute.source, permute.target, permute.chunks, strict=True):
            sign = "+" if permute.adds else ""
            words.append(f"{source}->{target} {sign}{','.join(map(str, chunks))}  ")
    return " ".join(words).rstrip()
