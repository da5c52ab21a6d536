"""Packs conversations into rows, none across the end of a row."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from meshpar.data.chat.targets import Encoded
from meshpar.data.packing import Batch


class RowPiece(NamedTuple):
    """Tokens integers[length] and the target of each, int32[length], or -1 where nothing is learned."""

    tokens: np.ndarray
    targets: np.ndarray


def learned_piece(encoded: Encoded) -> RowPiece:
    """Each token predicts the next; what follows the last target teaches nothing, and is left out.

    Raises:
      ValueError: nothing is learned.
    """
    ids = encoded.ids.astype(np.int32)
    targets = np.where(encoded.is_learned[1:], ids[1:], np.int32(-1))
    if not (targets >= 0).any():
        raise ValueError("the template writes no token of an answer, so nothing is learned")
    size = int(np.flatnonzero(targets >= 0)[-1]) + 1
    return RowPiece(ids[:size], targets[:size])


@dataclass(frozen=True, repr=False)
class ConversationRows:
    """Rows of conversations: the rows of a data set, as `PackedRows` are.

    Args:
      pieces: none longer than a row.
      num_documents: the conversations.
      pad: the token of padding.
      joined: whether a token attends to all earlier tokens of its row.
      of_row: the number of pieces of each row, in their order. Default: as many as it has room for, in any order.

    >>> pieces = [RowPiece(np.array([1, 2, 3]), np.array([-1, 3, 4])), RowPiece(np.array([5]), np.array([6]))]
    >>> for name, array in ConversationRows(pieces, 2, seq_len=4, pad=0).batch([0]).items():
    ...     print(f"{name:9}", *array.tolist())
    tokens    [1, 2, 3, 5]
    targets   [-1, 3, 4, 6]
    segments  [1, 1, 1, 2]
    positions [0, 1, 2, 0]
    """

    pieces: Sequence[RowPiece]
    num_documents: int
    seq_len: int
    pad: int
    joined: bool = False
    of_row: int | None = None

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_tokens(self) -> int:
        """The tokens, without padding."""
        return sum(len(piece.tokens) for piece in self.pieces)

    def batch(self, rows: ArrayLike) -> Batch:
        """The rows of these indices, see `PackedRows.batch`. An index at or beyond `len(self)` is a row of padding."""
        chosen = np.asarray(rows, np.int64)
        shape = (len(chosen), self.seq_len)
        arrays = {
            "tokens": np.full(shape, self.pad, np.int32), "targets": np.full(shape, -1, np.int32),
            "segments": np.zeros(shape, np.int32), "positions": np.zeros(shape, np.int32),
        }  # fmt: skip
        for i, row in enumerate(chosen.tolist()):
            at = 0
            for number, piece in enumerate(self._rows[row] if row < len(self) else (), 1):
                tokens, targets = self.pieces[piece]
                here = slice(at, at := at + len(tokens))
                arrays["tokens"][i, here], arrays["targets"][i, here] = tokens, targets
                arrays["segments"][i, here], arrays["positions"][i, here] = number, np.arange(len(tokens))
        if self.joined:
            del arrays["segments"]
            arrays["positions"] = np.broadcast_to(np.arange(self.seq_len, dtype=np.int32), shape)
        return arrays

    @cached_property
    def _rows(self) -> list[list[int]]:
        if self.of_row:
            at = range(len(self.pieces))
            return [list(at[start : start + self.of_row]) for start in at[:: self.of_row]]
        return packed([len(piece.tokens) for piece in self.pieces], self.seq_len)


def packed(sizes: Sequence[int], room: int) -> list[list[int]]:
    """The pieces of each row: the longest first, each into the fullest row that has room for it (best fit).

    >>> packed([3, 2, 4, 1], room=5)
    [[2, 3], [0, 1]]
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room, row), ascending
    for piece in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = bisect_left(free, (sizes[piece], -1))
        left, row = free.pop(at) if at < len(free) else (room, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(piece)
        insort(free, (left - sizes[piece], row))
    return rows
