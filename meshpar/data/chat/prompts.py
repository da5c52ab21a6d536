"""Prompts in JSON Lines, which a model answers while it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from meshpar.data.chat.conversations import read_prompt
from meshpar.data.chat.rendered import Rendered
from meshpar.data.chat.rows import ConversationRows, RowPiece
from meshpar.data.packing import Batch

LINES = "lines"
"""The array of a batch of prompts with the index of the line of each, or -1 where there is none."""


class Prompts(Rendered):
    """Files with a prompt per line, for `loss.kind: grpo`.

    A line is a JSON object with `prompt`, a text or a list of messages; or with `messages`. The function of the reward
    gets the whole object, so other keys may say what a good answer is. A row is a prompt and an answer to it.

    >>> Prompts(path="prompts.jsonl", tokenizer="model/tokenizer.json").held_out_fraction
    0.05
    """

    kind: Literal["prompts"] = "prompts"

    def rows(self) -> tuple[PromptRows, PromptRows]:
        prompts = self.prompts()
        every = [prompt.line for prompt in prompts]

        def side(chosen: np.ndarray) -> PromptRows:
            pieces = [RowPiece(prompts[i].tokens, np.full_like(prompts[i].tokens, -1)) for i in chosen]
            return PromptRows(pieces, len(chosen), self.seq_len, self.tokenizer.bos, of_row=1, lines=every, at=chosen)

        train, held_out = self.sides([prompt.share for prompt in prompts])
        return side(train), side(held_out)

    def prompts(self) -> list[Prompt]:
        """The prompts, in the order of the files.

        Raises:
          DataError: lists the lines that are no prompts, that the template refuses, or that are too long.
        """
        encoder = self.encoder()

        def encode(data: Any) -> tuple[Any, np.ndarray]:
            tokens = encoder.encode_prompt(read_prompt(data))
            if len(tokens) > self.seq_len:
                what = f"the prompt has {len(tokens)} tokens, and its answer has no room in data.seq_len"
                raise ValueError(f"{what} = {self.seq_len}", f"data.seq_len={len(tokens) + 64}")
            return data, tokens

        return [Prompt(data, tokens, share) for share, (data, tokens) in self.encoded(encode)]


@dataclass(frozen=True)
class Prompt:
    """The object of a line, its tokens int32[length], and the number that decides whether it is held out."""

    line: Mapping[str, Any]
    tokens: np.ndarray
    share: float


@dataclass(frozen=True, repr=False)
class PromptRows(ConversationRows):
    """Rows of prompts.

    Args:
      lines: the objects of all lines, also of those of other rows.
      at: int64[rows]. The index of the line of each row.
    """

    lines: Sequence[Mapping[str, Any]] = ()
    at: ArrayLike = ()

    def batch(self, rows: ArrayLike) -> Batch:
        """As `ConversationRows.batch`, with the array `LINES`: in each column the same, because all have columns."""
        chosen = np.asarray(rows, np.int64)
        of_row = np.append(np.asarray(self.at, np.int32), np.int32(-1))[np.minimum(chosen, len(self))]
        return super().batch(rows) | {LINES: np.broadcast_to(of_row[:, None], (len(chosen), self.seq_len))}
