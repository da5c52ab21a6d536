"""Documents packed into rows of one length, without a lost or a repeated token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

ARRAYS = ("tokens", "targets", "segments", "positions")
"""The arrays of a batch, int32[batch, seq] each; see `Rows.batch`."""
Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Rows:
    """A corpus as rows of `seq_len` tokens, cut from one array when they are asked for.

    Args:
      tokens: unsigned[num_tokens]. All documents in a line, each opened by `bos`.
      bos: the token that opens a document, and stands nowhere else.
      seq_len: tokens a row.

    Memory: that of `tokens`, two bytes a token for the vocabularies here; a batch is built when it is read.

    >>> rows = Rows(np.array([9, 1, 2, 3, 9, 4], np.uint16), bos=9, seq_len=4)
    >>> for name, array in rows.batch([0, 1]).items():
    ...     print(f"{name:9}", *array.tolist())
    tokens    [9, 1, 2, 3] [9, 4, 9, 9]
    targets   [1, 2, 3, -1] [4, -1, -1, -1]
    segments  [1, 1, 1, 1] [1, 1, 0, 0]
    positions [0, 1, 2, 3] [0, 1, 0, 0]
    """

    tokens: np.ndarray
    bos: int
    seq_len: int

    def __len__(self) -> int:
        return -(-len(self.tokens) // self.seq_len)

    @cached_property
    def num_documents(self) -> int:
        return int(np.count_nonzero(self.tokens == self.bos))

    def batch(self, rows: ArrayLike) -> Batch:
        """The rows of these indices.

        A document that crosses the end of a row goes on in the next as a new segment with positions from 0:
        what it would attend to is in another row. A token's target is the next token of its document, even if
        that is in the next row; a document's last token has none. So each token but
        `bos` is a target exactly once.

        Args:
          rows: int[batch]. An index at or beyond `len(self)` gives a row of padding.

        Returns:
          int32[batch, seq] each. `targets` is -1 where the loss does not count. `segments` numbers the pieces
          of documents in a row from 1, and is 0 for padding, whose token is `bos`. `positions` counts from
          the start of the piece.
        """
        at = np.asarray(rows, np.int64)[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        real = at < len(self.tokens)
        tokens = np.where(real, self.tokens.take(at, mode="clip"), self.bos).astype(np.int32)
        return {
            "tokens": tokens[:, :-1],
            "targets": np.where(tokens[:, 1:] == self.bos, np.int32(-1), tokens[:, 1:]),
            **self._pieces(tokens[:, :-1], real[:, :-1]),
        }

    def _pieces(self, tokens: np.ndarray, real: np.ndarray) -> Batch:
        opens = tokens == self.bos
        opens[:, 0] = True  # the rest of a document from the row before
        column = np.arange(self.seq_len, dtype=np.int32)
        start = np.maximum.accumulate(np.where(opens, column, 0), axis=1)
        return {"segments": np.cumsum(opens, axis=1, dtype=np.int32) * real, "positions": column - start}


def pack(documents: Iterable[np.ndarray], bos: int, seq_len: int) -> Rows:
    """Rows of these documents in this order.

    Args:
      documents: integers[length] each, all below `bos`.

    >>> pack([np.array([1, 2]), np.array([3])], bos=9, seq_len=4).tokens.tolist()
    [9, 1, 2, 9, 3]
    """
    dtype = np.min_scalar_type(bos)
    pieces = [piece for document in documents for piece in (np.array([bos], dtype), document)]
    return Rows(np.concatenate(pieces, dtype=dtype, casting="unsafe"), bos, seq_len)
