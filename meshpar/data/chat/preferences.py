"""Pairs of answers in JSON Lines, for losses of preferences."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from meshpar.data.chat.conversations import Conversation, read_pair
from meshpar.data.chat.encoded_lines import encoded_lines
from meshpar.data.chat.rendered import Rendered
from meshpar.data.chat.rows import ConversationRows, RowPiece, piece_of
from meshpar.data.chat.targets import Encoder
from meshpar.data.documents import HEADING, is_held_out, share
from meshpar.errors import DataError, DataWarning, Problems


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
        held_out = is_held_out(np.array([one.share for one in pairs]), self.held_out_fraction)

        def side(of: bool) -> ConversationRows:
            chosen = [one for one, is_out in zip(pairs, held_out, strict=True) if is_out == of]
            pieces = [piece for one in chosen for piece in (one.chosen, one.rejected)]
            return ConversationRows(pieces, len(chosen), self.seq_len, self.tokenizer.bos, of_row=2)

        return side(False), side(True)

    def pairs(self) -> list[Pair]:
        """The pairs, in the order of the files.

        Raises:
          DataError: lists the lines that are no pairs, that the template refuses, or that are too long.

        Warns:
          DataWarning: pairs were left out, with their number.
        """
        found = list(self._pairs(self.encoder()))
        kept = [one for one in found if one.size <= self.seq_len]
        if len(kept) < len(found):
            what = f"{len(found) - len(kept)} of {len(found)} pairs are longer than data.seq_len = {self.seq_len}"
            warnings.warn(f"{what}: left out", DataWarning, stacklevel=2)
        return kept

    def _pairs(self, encoder: Encoder) -> Iterator[Pair]:
        problems = Problems()

        def encode(data: Any) -> tuple[RowPiece, RowPiece]:
            chosen, rejected = (_piece(encoder, one) for one in read_pair(data))
            return chosen, rejected

        for where, line, pieces in encoded_lines(self.files(), encode, problems):
            pair = Pair(*pieces, share(line.strip()))
            if pair.size > self.seq_len and self.if_longer == "refuse":
                what = f"both conversations have {pair.size} tokens, more than data.seq_len = {self.seq_len}"
                problems.add(where, what, f"data.seq_len={pair.size}, or data.if_longer=drop")
            elif not problems:
                yield pair
        problems.raise_any(DataError, HEADING)


class Pair(NamedTuple):
    """A pair of conversations, and the number that decides whether it is held out."""

    chosen: RowPiece
    rejected: RowPiece
    share: float

    @property
    def size(self) -> int:
        """Their tokens together."""
        return len(self.chosen.tokens) + len(self.rejected.tokens)


def _piece(encoder: Encoder, conversation: Conversation) -> RowPiece:
    (encoded,) = encoder.encode(conversation)
    piece = piece_of(encoded)
    if not len(piece.tokens):
        raise ValueError("the template writes no token of an answer, so nothing is learned")
    return piece
