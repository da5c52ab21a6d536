"""Decodes an answer token by token: its text, the part that can be shown, and where it ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from meshpar.data.tokenizer import Tokenizer, TokenizerFile
from meshpar.serve.scores import TokenScore

Finish = Literal["stop", "end", "length"]
"""Why an answer ended: at a stop string, at an end id, or at `max_tokens`."""
CONTEXT = 16
"""Tokens of a prompt that are decoded with the first ones of its answer: some decoders drop a text's first space."""


class AnswerPiece(NamedTuple):
    """The next piece of an answer.

    Args:
      row: index of the prompt.
      text: may be empty.
      finish: why the answer ends with this piece; None if it continues.
      num_tokens: tokens of the answer up to here, if they are counted.
    """

    row: int
    text: str
    finish: Finish | None
    num_tokens: int = 0


class Answer:
    """The answer to one prompt.

    A character whose bytes span several tokens is shown when it is complete. Text that may be the beginning of a stop
    string is shown when it is certain not to be.

    Args:
      stop: texts before which the answer ends.
      max_tokens: largest number of tokens; with 0 it ends when the first one is computed, and has none.
      ends: ids that end the answer. Default: those that open and close a document.
      prompt: the tokens before the answer.
      kept: special tokens whose texts are a part of the answer's.

    `scores` are those of its tokens, `prompt_scores` those of the prompt's after the first; empty if nobody asked.

    Examples:
      >>> from meshpar.data.tokenizer import Bytes
      >>> answer = Answer(Bytes(), stop=["END"], max_tokens=99)
      >>> [answer.add(token) for token in "né. EN END".encode()]
      ['n', '', 'é', '.', ' ', '', '', 'EN ', '', '', '']
      >>> answer.text, answer.finish
      ('né. EN ', 'stop')
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str], max_tokens: int, ends: Collection[int | None] | None = None,
        prompt: Sequence[int] = (), kept: Collection[int] = (),
    ):  # fmt: skip
        self.tokens: list[int] = []
        self.scores: list[TokenScore] = []
        self.prompt_scores: list[TokenScore] = []
        self.text = ""
        self.finish: Finish | None = None
        self._decode: Callable[[Iterable[int]], str] = tokenizer.decode
        if kept and isinstance(tokenizer, TokenizerFile):
            self._decode = partial(tokenizer.decode_keeping, kept=frozenset(kept))
        self._stop = stop
        self._max_tokens = max_tokens
        self._ends = (tokenizer.bos, tokenizer.eos) if ends is None else ends
        self._before = _context(tokenizer, prompt)
        self._shown = 0  # characters
        self._context = -len(self._before)  # tokens before which nothing is decoded again; those of the prompt are < 0
        self._read = 0  # tokens whose text is complete

    def add(self, token: int, score: TokenScore | None = None) -> str:
        """Adds the next token, and its score; returns the text that can be shown now."""
        assert self.finish is None, "the answer has ended"
        if self._max_tokens == 0:
            self.finish = "length"
        elif token in self._ends:
            self.finish = "end"
        else:
            self.tokens.append(token)
            self.scores += [score] if score is not None else []
            if len(self.tokens) == self._max_tokens:
                self.finish = "length"
        self.text += self._decoded()
        ends = [at for stop in self._stop if (at := self.text.find(stop, self._shown)) >= 0]
        if ends:
            self.text = self.text[: min(ends)]
            self.finish = "stop"
        end = len(self.text)
        if self.finish is None:
            end -= max((overlap(self.text[self._shown :], stop) for stop in self._stop), default=0)
        shown = self.text[self._shown : end]
        self._shown = end
        return shown

    @property
    def shown(self) -> str:
        """The text that can be shown now: all pieces so far."""
        return self.text[: self._shown]

    def _decoded(self) -> str:
        """The text of the tokens that were not read yet; empty while a character is incomplete.

        They are decoded together with the tokens read last, because the text of a token may depend on the one before.
        """
        first = self._before if self._context < 0 else []
        begin = max(0, self._context)
        before = self._decode([*first, *self.tokens[begin : self._read]])
        text = self._decode([*first, *self.tokens[begin:]])
        if text.endswith("\ufffd") and self.finish is None:
            return ""
        self._context = self._read
        self._read = len(self.tokens)
        return text[len(before) :]


def _context(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """The last tokens of a prompt, unless they end within a character."""
    last = list(prompt[-CONTEXT:]) if isinstance(tokenizer, TokenizerFile) else []
    return [] if tokenizer.decode(last).endswith("\ufffd") else last


def overlap(text: str, stop: str) -> int:
    """The number of characters at the end of a text that may be the beginning of a stop string.

    >>> overlap("the EN", "END"), overlap("the ENDE", "END")
    (2, 1)
    """
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)
