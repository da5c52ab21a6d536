"""Speculative decoding: a drafter guesses the next tokens of rows, and the model checks all of them in one step.

The noise with which a token is sampled depends only on its row and position. So the logits at a position determine the
token that the model samples there, and a draft is accepted if it is that token. The first wrong draft is replaced by
the model's own token, and those after it are discarded. The answer is the same as without drafts, token for token,
greedy or sampled, whatever the drafter proposes. A smaller model samples with the same noise, so that it draws the same
token more often.

Source: Leviathan et al. 2023, arXiv:2211.17192 (speculative decoding); Daliri et al. 2025, arXiv:2408.07978 (a draft
that shares the noise, and an answer that does not depend on the drafter); Saxena 2023, "Prompt lookup decoding".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from meshpar.serve.scheduler import Chunk, Row


class Drafter(Protocol):
    """Proposes the next tokens of rows: `NGrams`, or a `DraftModel`."""

    @property
    def num_drafts(self) -> int:
        """The most tokens of a row that it proposes."""
        ...

    def prefill(self, chunks: Sequence[Chunk | None]) -> object:
        """Reads the chunks of prompts that are computed in a turn."""
        ...

    def propose(self, rows: Sequence[Row | None]) -> list[list[int]]:
        """Drafts of the tokens after the newest one of each row, all of which its answer has room for.

        It is called in each turn that decodes rows.
        """
        ...


@dataclass
class NGrams:
    """Proposes what followed the last earlier occurrence of the newest `size` tokens of a row; else nothing.

    Args:
      size: tokens that must occur again.
      num_drafts: the most tokens of a row that are proposed.

    Source: Saxena 2023, "Prompt lookup decoding".
    """

    size: int
    num_drafts: int
    _indices: dict[Row, NGramIndex] = field(default_factory=dict)

    def prefill(self, chunks: Sequence[Chunk | None]) -> None:
        """Does nothing: prompts are read when their rows are decoded."""

    def propose(self, rows: Sequence[Row | None]) -> list[list[int]]:
        """See `Drafter.propose`."""
        self._indices = {row: self._indices.get(row) or NGramIndex(row.tokens, self.size) for row in rows if row}
        return [self._indices[row].propose(min(self.num_drafts, row.num_missing - 1)) if row else [] for row in rows]


class NGramIndex:
    """Where each n-gram of a growing list of tokens occurred last.

    Args:
      tokens: may be extended between calls.
      size: n.

    >>> NGramIndex([1, 2, 3, 4, 1, 2], 2).propose(3), NGramIndex([1, 2, 3], 2).propose(3)
    ([3, 4, 1], [])

    Text with a period is continued beyond its end:

    >>> NGramIndex([7, 8, 9, 8, 9], 2).propose(3)
    [8, 9, 8]
    """

    def __init__(self, tokens: list[int], size: int):
        self._tokens = tokens
        self._size = size
        self._next = size  # the end of the first n-gram that is not stored
        self._ends: dict[tuple[int, ...], int] = {}

    def propose(self, num: int) -> list[int]:
        """The `num` tokens after the last earlier occurrence of the newest n-gram; none if it is new."""
        end = len(self._tokens)
        for earlier in range(self._next, end):
            self._ends[tuple(self._tokens[earlier - self._size : earlier])] = earlier
        self._next = max(end, self._size)
        found = self._ends.get(tuple(self._tokens[-self._size :]))
        if found is None:
            return []
        period = end - found
        return [self._tokens[found + i % period] for i in range(num)]


def accepted(drafts: Sequence[int], own: Sequence[int]) -> list[int]:
    """The tokens that a check adds to a row: the drafts before the first wrong one, and the model's token after them.

    Args:
      own: the token that the model samples after the newest one, and after each draft.

    >>> accepted([1, 2, 3], [1, 2, 4, 5]), accepted([1], [1, 6]), accepted([], [7])
    ([1, 2, 4], [1, 6], [7])
    """
    num = next((i for i, draft in enumerate(drafts) if draft != own[i]), len(drafts))
    return list(own[: num + 1])
