"""Conversations in JSON Lines, as rows with targets on the answers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from meshpar.data.chat.conversations import read
from meshpar.data.chat.encoded_lines import encoded_lines
from meshpar.data.chat.rendered import Rendered
from meshpar.data.chat.rows import ConversationRows, RowPiece, piece_of
from meshpar.data.chat.targets import Encoded, Encoder
from meshpar.data.documents import HEADING, is_held_out, share
from meshpar.errors import DataError, DataWarning, Problems

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
        held_out = is_held_out(np.array([one.share for one in examples]), self.held_out_fraction)
        joined = self.documents_in_row == "joined"

        def side(of: bool) -> ConversationRows:
            chosen = [one for one, is_out in zip(examples, held_out, strict=True) if is_out == of]
            pieces = [piece for one in chosen for piece in one.pieces]
            return ConversationRows(pieces, len(chosen), self.seq_len, self.tokenizer.bos, joined)

        return side(False), side(True)

    def examples(self) -> list[Example]:
        """What is learned, in the order of the files.

        Raises:
          DataError: lists the lines that are no conversations, that the template refuses, or that are too long.

        Warns:
          DataWarning: conversations were cut or left out, with their number; or no answer teaches the model to stop.
        """
        files = self.files()
        encoder = self.encoder(self.answers == "apart")
        found = list(self._examples(files, encoder))
        longer = [one for one in found if one.size > self.seq_len]
        kept = [one for one in found if one.pieces]
        ends = list(encoder.ends)
        if kept and not any(np.isin(piece.targets, ends).any() for one in kept for piece in one.pieces):
            what = "no answer ends with an id at which the model stops, so it does not learn to stop"
            fix = "mark the end of a turn in the template, or name it in eos_token"
            warnings.warn(f"data: {what}: {fix}", DataWarning, stacklevel=2)
        if longer and self.if_longer != "refuse":
            done = {"truncate": "truncated", "split": "split", "drop": "left out"}[self.if_longer]
            lost = sum(not one.pieces for one in found)
            without = f"; {lost} of {len(found)} have no target left" if lost and self.if_longer != "drop" else ""
            what = f"{len(longer)} of {len(found)} conversations are longer than data.seq_len = {self.seq_len}"
            warnings.warn(f"{what}: {done}{without}", DataWarning, stacklevel=2)
        return kept

    def _examples(self, files: list[Path], encoder: Encoder) -> Iterator[Example]:
        problems = Problems()
        for where, line, encoded in encoded_lines(files, lambda data: encoder.encode(read(data)), problems):
            for one in encoded:
                example = _example(one, share(line.strip()), self.seq_len, self.if_longer)
                if not example.size:
                    problems.add(where, "the template writes no token of an answer, so nothing is learned")
                elif example.size > self.seq_len and self.if_longer == "refuse":
                    what = f"has {example.size} tokens, more than data.seq_len = {self.seq_len}"
                    problems.add(where, what, "data.seq_len, or data.if_longer=truncate, split or drop")
                elif not problems:
                    yield example
        problems.raise_any(DataError, HEADING)


@dataclass(frozen=True)
class Example:
    """A conversation, or the part of it that teaches one answer.

    Args:
      encoded: all of its tokens.
      share: decides whether it is held out.
      size: the number of tokens up to the last that is learned.
      pieces: what is in the rows: one piece, several, or none.
    """

    encoded: Encoded
    share: float
    size: int
    pieces: tuple[RowPiece, ...]


def _example(encoded: Encoded, of_share: float, seq_len: int, if_longer: IfLonger) -> Example:
    ids, targets = piece_of(encoded)
    size = len(ids)
    starts = range(0, size, seq_len)
    if size > seq_len:
        starts = {"refuse": (), "drop": (), "truncate": (0,), "split": starts}[if_longer]
    ends = [min(size, start + seq_len) for start in starts]
    pieces = [RowPiece(ids[start:end], targets[start:end]) for start, end in zip(starts, ends, strict=True)]
    return Example(encoded, of_share, size, tuple(piece for piece in pieces if (piece.targets >= 0).any()))
