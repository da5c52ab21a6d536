"""Pairs of answers in JSON Lines, for losses of preferences."""

from __future__ import annotations

import warnings
from typing import Any, Literal, NamedTuple

import numpy as np

from meshpar.data.chat.conversations import read_pair
from meshpar.data.chat.rendered import Rendered
from meshpar.data.chat.rows import ConversationRows, RowPiece, learned_piece
from meshpar.errors import DataWarning


class Preferences(Rendered):
    """Files with a pair of answers per line.

    A line is a JSON object with `prompt`, `chosen` and `rejected`: texts, or lists of messages. Without `prompt`, the
    messages with which both sides begin are the prompt. A row is a pair: the chosen conversation, then the rejected
    one. Neither attends to the other.

    >>> Preferences(path="pairs.jsonl", tokenizer="model/tokenizer.json").if_longer
    'refuse'
    """

    kind: Literal["preferences"] = "preferences"
    if_longer: Literal["refuse", "drop"] = "refuse"
    """Whether a pair whose two conversations have more than `seq_len` tokens is an error, or is left out."""

    def rows(self) -> tuple[ConversationRows, ConversationRows]:
        pairs = self.pairs()

        def side(chosen: np.ndarray) -> ConversationRows:
            pieces = [piece for i in chosen for piece in (pairs[i].chosen, pairs[i].rejected)]
            return ConversationRows(pieces, len(chosen), self.seq_len, self.tokenizer.bos, of_row=2)

        train, held_out = self.sides([pair.share for pair in pairs])
        return side(train), side(held_out)

    def pairs(self) -> list[Pair]:
        """The pairs, in the order of the files.

        Raises:
          DataError: lists the lines that are no pairs, that the template refuses, or that are too long.

        Warns:
          DataWarning: pairs were left out, with their number.
        """
        encoder = self.encoder()

        def encode(data: Any) -> tuple[RowPiece, RowPiece]:
            chosen, rejected = (learned_piece(*encoder.encode(conversation)) for conversation in read_pair(data))
            size = len(chosen.tokens) + len(rejected.tokens)
            if size > self.seq_len and self.if_longer == "refuse":
                what = f"both conversations have {size} tokens, more than data.seq_len = {self.seq_len}"
                raise ValueError(what, f"data.seq_len={size}, or data.if_longer=drop")
            return chosen, rejected

        pairs = [Pair(*pieces, share) for share, pieces in self.encoded(encode)]
        kept = [pair for pair in pairs if pair.size <= self.seq_len]
        if len(kept) < len(pairs):
            what = f"{len(pairs) - len(kept)} of {len(pairs)} pairs are longer than data.seq_len = {self.seq_len}"
            warnings.warn(f"{what}: left out", DataWarning, stacklevel=2)
        return kept


class Pair(NamedTuple):
    """A pair of conversations, and the number that decides whether it is held out."""

    chosen: RowPiece
    rejected: RowPiece
    share: float

    @property
    def size(self) -> int:
        """Their tokens together."""
        return len(self.chosen.tokens) + len(self.rejected.tokens)
