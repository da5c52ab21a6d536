"""An answer as it comes, token by token: its text, what of it can be shown yet, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from meshpar.train.data.tokenizer import Tokenizer

Finish = Literal["stop", "end", "length"]
"""Why an answer ended: at a stop string, at the end of the document, or because it may be no longer."""


class Answer:
    """One row's answer.

    A character whose bytes come in several tokens is shown once it is whole; what might become a stop string, once it
    cannot any more.

    Args:
      stop: texts before which the answer ends.
      max_tokens: the most tokens that it may have.

    Example:
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
        self._tokenizer, self._stop, self._max_tokens = tokenizer, stop, max_tokens
        self._closing = {tokenizer.bos, tokenizer.eos}
        self._shown = self._read = self._context = 0

    def add(self, token: int) -> str:
        """The next token; returns the text that can be shown now."""
        assert self.finish is None, "the answer has ended"
        if token in self._closing:
            self.finish = "end"
        else:
            self.tokens.append(token)
            if len(self.tokens) == self._max_tokens:
                self.finish = "length"
        self.text += self._decoded()
        self._end_before_stop()
        return self._show()

    def _decoded(self) -> str:
        """The text of the tokens that were not read yet; none while a character is not whole.

        They are decoded after those read last, for a tokenizer may write a token otherwise where a text begins.
        """
        before = self._tokenizer.decode(self.tokens[self._context : self._read])
        text = self._tokenizer.decode(self.tokens[self._context :])
        if text.endswith("\ufffd") and self.finish is None:
            return ""
        self._context, self._read = self._read, len(self.tokens)
        return text[len(before) :]

    def _end_before_stop(self) -> None:
        found = [at for stop in self._stop if (at := self.text.find(stop, self._shown)) >= 0]
        if found:
            self.text, self.finish = self.text[: min(found)], "stop"

    def _show(self) -> str:
        held = 0 if self.finish else max((_overlap(self.text[self._shown :], stop) for stop in self._stop), default=0)
        start, self._shown = self._shown, len(self.text) - held
        return self.text[start : self._shown]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text could be the beginning of a stop string.

    >>> _overlap("the EN", "END"), _overlap("the ENDE", "END")
    (2, 1)
    """
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)
