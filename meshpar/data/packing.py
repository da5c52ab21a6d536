"""Packs documents into rows of equal length, without losing or repeating a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

ARRAYS = ("tokens", "targets", "segments", "positions")
"""The arrays of a batch, int32[batch, seq] each; see `PackedRows.batch`."""
Batch = dict[str, np.ndarray]


class TokenSequence(Protocol):
    """Documents of which tokens are read by their positions: `Documents`, or those of shards."""

    @property
    def num_tokens(self) -> int: ...

    def __len__(self) -> int: ...

    def take(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `Documents.take`. Positions int64[rows, length] are consecutive in each row."""
        ...


@dataclass(frozen=True)
class PackedRows:
    """The sequence of all documents as rows of `seq_len` tokens, which are read on request.

    >>> from meshpar.data.documents import Documents
    >>> documents = Documents.joined([(0.0, np.array([1, 2, 3])), (0.0, np.array([4]))], bos=9, dtype=np.uint8)
    >>> for name, array in PackedRows(documents, seq_len=4).batch([0, 1]).items():
    ...     print(f"{name:9}", *array.tolist())
    tokens    [9, 1, 2, 3] [9, 4, 9, 9]
    targets   [1, 2, 3, -1] [4, -1, -1, -1]
    segments  [1, 1, 1, 1] [1, 1, 0, 0]
    positions [0, 1, 2, 3] [0, 1, 0, 0]
    """

    documents: TokenSequence
    seq_len: int
    joined: bool = False
    """Whether all tokens of a row count as one document."""

    def __len__(self) -> int:
        return -(-self.documents.num_tokens // self.seq_len)

    @property
    def num_documents(self) -> int:
        return len(self.documents)

    @property
    def num_tokens(self) -> int:
        """The tokens, with one `bos` per document, and without padding."""
        return self.documents.num_tokens

    def batch(self, rows: ArrayLike) -> Batch:
        """The rows of these indices; no other rows are read.

        A document that crosses the end of a row continues in the next row as a new segment with positions from 0,
        because attention does not cross rows. A token's target is the next token of its document, even if that is in
        the next row; a document's last token has no target. So each token but `bos` is a target exactly once.

        Args:
          rows: int[batch]. An index at or beyond `len(self)` yields a row of padding.

        Returns:
          int32[batch, seq] each. `targets` is -1 where the loss ignores it. `segments` numbers the pieces of documents
          in a row from 1, and is 0 for padding, whose token is `bos`. `positions` counts from the start of the piece.
          Joined rows have no `segments`, and positions count from the start of the row.
        """
        at = np.asarray(rows, np.int64)[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        tokens, opens = self.documents.take(at)
        targets = np.where(opens, np.int32(-1), tokens)[:, 1:]
        arrays = {"tokens": tokens[:, :-1], "targets": targets}
        if self.joined:
            column = np.arange(self.seq_len, dtype=np.int32)
            return arrays | {"positions": np.broadcast_to(column, targets.shape)}
        return arrays | self._pieces(at[:, :-1], opens[:, :-1])

    def _pieces(self, at: np.ndarray, opens: np.ndarray) -> Batch:
        opens = opens.copy()
        opens[:, 0] = True  # continues a document of the previous row, as a new piece
        column = np.arange(self.seq_len, dtype=np.int32)
        start = np.maximum.accumulate(np.where(opens, column, 0), axis=1)
        real = at < self.documents.num_tokens
        return {"segments": np.cumsum(opens, axis=1, dtype=np.int32) * real, "positions": column - start}
