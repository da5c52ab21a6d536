"""Plans: a collective algorithm as a table of who sends which chunk to whom, and whether it is added or copied.

A buffer of S bytes is cut into chunks. Each rank of a group has a slot for every chunk; in a round, messages carry
chunks from slots of their source to the same slots of their target. A message may *add* to what its target holds or
fill what is empty, and its source may *keep* its chunk or give it up:

| | source keeps | source gives up |
|---|---|---|
| **target fills** | copy | move |
| **target adds** | exchange | reduce |

As a matrix on the two slots, `[[keeps, 0], [1, adds]]`. Its transpose sends the other way, with `adds` and `keeps`
swapped: so the transpose of a plan, which is its derivative, is the table read backwards. A reduce-scatter is an
all-gather's, a gather a scatter's, a reduction a broadcast's.

The simulator, the executor and the choice of an algorithm read the same tables; so do the formulas of the tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
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
"""In a table of slots: no slot."""


@dataclass(frozen=True, eq=False)
class Permute:
    """Messages that travel at once, each of as many chunks, no two from or to the same rank: one `lax.ppermute`.

    Args:
      source: int[m]. Ranks that send.
      target: int[m]. To whom.
      chunks: int[m, c]. What each message carries.
      adds: whether the target adds them to its own; else its slots are empty, and get them.
      keeps: whether the source keeps them; else its slots are empty afterwards.
    """

    source: np.ndarray
    target: np.ndarray
    chunks: np.ndarray
    adds: bool = False
    keeps: bool = True

    @cached_property
    def transposed(self) -> Permute:
        return Permute(self.target, self.source, self.chunks, adds=self.keeps, keeps=self.adds)


Round = tuple[Permute, ...]
"""What travels at once, in one direction each; all is read before anything is written."""


@dataclass(frozen=True, eq=False)
class Plan:
    """An algorithm for a group of ranks.

    Args:
      operation: what it computes.
      num_ranks: n, of the group.
      num_chunks: into how many the whole buffer of S bytes is cut: slots of each rank.
      rounds: what is sent, in order.
      given: int[n, blocks]. The slot in which a rank's input begins, block by block; NONE if the block is not used.
      taken: int[n, blocks]. The slot from which its output comes; NONE for zeros.
      root: of a broadcast, scatter, gather or reduction.
    """

    operation: Operation
    num_ranks: int
    num_chunks: int
    rounds: tuple[Round, ...]
    given: np.ndarray
    taken: np.ndarray
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
        """The derivative's plan: it brings each cotangent to where its value came from, and sums there."""
        rounds = tuple(tuple(permute.transposed for permute in round_) for round_ in reversed(self.rounds))
        operation = TRANSPOSED[self.operation]
        return Plan(operation, self.num_ranks, self.num_chunks, rounds, self.taken, self.given, self.root)

    def then(self, second: Plan, operation: Operation) -> Plan:
        """One plan after the other, the second beginning with the slots in which the first ends."""
        assert np.array_equal(self.taken, second.given), "the second begins elsewhere than the first ends"
        rounds = self.rounds + second.rounds
        return Plan(operation, self.num_ranks, self.num_chunks, rounds, self.given, second.taken, self.root)

    def __str__(self) -> str:
        """A line a round: `source -> target: chunks`, `+` where they are added.

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
            words.append(f"{source}->{target} {'+' * permute.adds}{','.join(map(str, chunks))}  ")
    return " ".join(words).rstrip()
