"""Conversations in JSON Lines, as rows with targets on the answers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from meshpar.data.chat.conversations import read
from meshpar.data.chat.rendered import Rendered
from meshpar.data.chat.rows import ConversationRows, RowPiece, learned_piece
from meshpar.data.chat.targets import Encoded
from meshpar.errors import DataWarning

IfLonger = Literal["refuse", "truncate", "split", "drop"]


class Chat(Rendered):
    """Files with a conversation per line, whose answers are learned.

    A line is a JSON object with `messages` (and `tools`), with `prompt` and `completion`, or with ShareGPT's
    `conversations`. A message with `weight: 0` is not learned. A row may have several conversations, and none attends
    to another.

    >>> Chat(path="chats.jsonl", tokenizer="model/tokenizer.json").if_longer
    'refuse'
    """

    kind: Literal["chat"] = "chat"
    if_longer: IfLonger = "refuse"
    """What happens to a conversation of more than `seq_len` tokens: an error; its end is cut off; it becomes pieces,
    which do not attend to each other; it is left out."""
    answers: Literal["together", "apart"] = "together"
    """Whether all answers are learned in one text, or each after the prompt that the model sees when it answers."""

    def rows(self) -> tuple[ConversationRows, ConversationRows]:
        examples = self.examples()

        def side(chosen: np.ndarray) -> ConversationRows:
            pieces = [piece for i in chosen for piece in examples[i].pieces]
            return ConversationRows(pieces, len(chosen), self.seq_len, self.tokenizer.bos, self.is_joined)

        train, held_out = self.sides([example.share for example in examples])
        return side(train), side(held_out)

    def examples(self) -> list[Example]:
        """What is learned, in the order of the files.

        Raises:
          DataError: lists the lines that are no conversations, that the template refuses, or that are too long.

        Warns:
          DataWarning: conversations were cut or left out, with their number; or no answer teaches the model to stop.
        """
        encoder = self.encoder(self.answers == "apart")

        def encode(data: Any) -> list[Example]:
            return [self._example(encoded) for encoded in encoder.encode(read(data))]

        examples = [replace(example, share=share) for share, some in self.encoded(encode) for example in some]
        longer = [example for example in examples if example.size > self.seq_len]
        kept = [example for example in examples if example.pieces]
        ends = list(encoder.ends)
        if kept and not any(np.isin(piece.targets, ends).any() for example in kept for piece in example.pieces):
            what = "no answer ends with an id at which the model stops, so it does not learn to stop"
            fix = "mark the end of a turn in the template, or name it in eos_token"
            warnings.warn(f"data: {what}: {fix}", DataWarning, stacklevel=2)
        if longer and self.if_longer != "refuse":
            done = {"truncate": "truncated", "split": "split", "drop": "left out"}[self.if_longer]
            lost = sum(not example.pieces for example in examples)
            without = f"; {lost} of {len(examples)} have no target left" if lost and self.if_longer != "drop" else ""
            what = f"{len(longer)} of {len(examples)} conversations are longer than data.seq_len = {self.seq_len}"
            warnings.warn(f"{what}: {done}{without}", DataWarning, stacklevel=2)
        return kept

    def _example(self, encoded: Encoded) -> Example:
        ids, targets = learned_piece(encoded)
        size = len(ids)
        starts = range(0, size, self.seq_len)
        if size > self.seq_len:
            if self.if_longer == "refuse":
                what = f"has {size} tokens, more than data.seq_len = {self.seq_len}"
                raise ValueError(what, "data.seq_len, or data.if_longer=truncate, split or drop")
            starts = {"drop": (), "truncate": (0,), "split": starts}[self.if_longer]
        ends = [min(size, start + self.seq_len) for start in starts]
        pieces = [RowPiece(ids[start:end], targets[start:end]) for start, end in zip(starts, ends, strict=True)]
        return Example(encoded, size, tuple(piece for piece in pieces if (piece.targets >= 0).any()))


@dataclass(frozen=True)
class Example:
    """A conversation, or the part of it that teaches one answer.

    Args:
      encoded: all of its tokens.
      size: the number of tokens up to the last that is learned.
      pieces: what is in the rows: one piece, several, or none.
      share: decides whether it is held out.
    """

    encoded: Encoded
    size: int
    pieces: tuple[RowPiece, ...]
    share: float = 0.0
