"""Decodes an answer token by token: its text, the part that can be shown, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from meshpar.train.data.tokenizer import Tokenizer

Finish = Literal["stop", "end", "length"]
"""Why an answer ended: at a stop string, at the end of the document, or at `max_tokens`."""


class Answer:
    """The answer to one prompt.

    A character whose bytes span several tokens is shown when it is complete. Text that may be the beginning of a stop
    string is shown when it is certain not to be.

    Args:
      stop: texts before which the answer ends.
      max_tokens: largest number of tokens.

    Examples:
      >>> from meshpar.train.data.tokenizer import Bytes
      >>> answer = Answer(Bytes(), stop=["END"], max_tokens=99)
      >>> [answer.add(token) for token in "né. EN END".encode()]
      ['n', '', 'é', '.', ' ', '', '', 'EN ', '', '', '']
      >>> answer.text, answer.finish
      ('né. EN ', 'stop')
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], max_tokens: int):
        self.tokens: list[int] = []
        self.text = ""
        self.finish: Finish | None = None
        self._tokenizer = tokenizer
        self._stop = stop
        self._max_tokens = max_tokens
        self._shown = 0  # characters
        self._context = 0  # tokens before which nothing is decoded again
        self._read = 0  # tokens whose text is complete

    def add(self, token: int) -> str:
        """Adds the next token; returns the text that can be shown now."""
        assert self.finish is None, "the answer has ended"
        if token in (self._tokenizer.bos, self._tokenizer.eos):
            self.finish = "end"
        else:
            self.tokens.append(token)
            if len(self.tokens) == self._max_tokens:
                self.finish = "length"
        self.text += self._decoded()
        found = [at for stop in self._stop if (at := self.text.find(stop, self._shown)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.finish = "stop"
        end = len(self.text)
        if self.finish is None:
            end -= max((_overlap(self.text[self._shown :], stop) for stop in self._stop), default=0)
        shown = self.text[self._shown : end]
        self._shown = end
        return shown

    def _decoded(self) -> str:
        """The text of the tokens that were not read yet; empty while a character is incomplete.

        They are decoded together with the tokens read last, because the text of a token may depend on the one before.
        """
        before = self._tokenizer.decode(self.tokens[self._context : self._read])
        text = self._tokenizer.decode(self.tokens[self._context :])
        if text.endswith("\ufffd") and self.finish is None:
            return ""
        self._context = self._read
        self._read = len(self.tokens)
        return text[len(before) :]


def _overlap(text: str, stop: str) -> int:
    """The number of characters at the end of a text that may be the beginning of a stop string.

    >>> _overlap("the EN", "END"), _overlap("the ENDE", "END")
    (2, 1)
    """
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)
