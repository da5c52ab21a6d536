"""Which tokens of a conversation are learned: those that the model writes when it answers.

A template that marks them with `{% generation %}` is believed. For any other, an answer is what the text of the
conversation up to it has more than the prompt before it: both are rendered, and must begin alike. The end of a turn is
learned, and what a template writes after it is not: the model stops there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from itertools import count, takewhile
from typing import Any, NamedTuple

import numpy as np

from meshpar.data.chat.conversations import Conversation, forged
from meshpar.data.chat.template import ChatTemplate
from meshpar.data.reading import SameForAllError
from meshpar.data.tokenizer import TokenizerFile
from meshpar.errors import excerpt

AROUND = 30
"""Characters on each side of a difference that an error shows."""


class UnsuitableTemplateError(SameForAllError):
    """By the template it cannot be told which tokens are learned: (what is wrong, the fix)."""


class Encoded(NamedTuple):
    """The tokens of a conversation integers[length], and whether each is learned, bool[length]."""

    ids: np.ndarray
    is_learned: np.ndarray


class _Text(NamedTuple):
    text: str
    spans: list[tuple[int, int]]
    is_marked: bool


@dataclass(frozen=True)
class Encoder:
    """Encodes conversations for a model.

    Args:
      ends: the ids at which the model stops.
      apart: whether each answer is an example of its own, after the prompt that the model would see.
      date: what a template may write as the date of today; None refuses one that writes it.
      options: further variables of the template.
    """

    tokenizer: TokenizerFile
    template: ChatTemplate
    ends: Collection[int]
    apart: bool
    date: datetime | None
    options: dict[str, Any]

    def encode(self, conversation: Conversation) -> list[Encoded]:
        """The examples of a conversation: one, or one for each answer.

        Raises:
          ValueError: (what is wrong), or (what is wrong, the fix).
          ConfigError: the template fails.
        """
        self._check(conversation)
        return [self._tokens(text) for text in self._texts(conversation)]

    def encode_prompt(self, conversation: Conversation) -> np.ndarray:
        """The tokens of a conversation up to where an answer begins, int32[length].

        Raises: see `encode`.
        """
        self._check(conversation)
        text = self._rendered(conversation, len(conversation.messages), answers=True).text
        return self.tokenizer.encode_special(text).astype(np.int32)

    def _check(self, conversation: Conversation) -> None:
        special = self.tokenizer.special_tokens
        for at, message in enumerate(conversation.messages):
            if found := forged(message, special):
                what = (
                    f"message {at + 1} contains {found!r}, a special token of the model, that only a template may write"
                )
                raise ValueError(what, "leave it out")
        if self.date is None and self.template.reads_the_date(bool(conversation.tools)):
            what = "the template may write the date of today, and tomorrow's tokens would be others"
            raise UnsuitableTemplateError(what, f"data.date={datetime.now():%Y-%m-%d}")

    def _texts(self, conversation: Conversation) -> list[_Text]:
        if self.apart:
            return [self._answer(conversation, at) for at in np.flatnonzero(conversation.is_learned).tolist()]
        if self.template.marks_answers(bool(conversation.tools)):
            return [self._marked(conversation)]
        return [self._by_prefixes(conversation)]

    def _marked(self, conversation: Conversation) -> _Text:
        """The conversation with the spans that its template marks."""
        rendered = self._rendered(conversation, len(conversation.messages), answers=False)
        spans = [span for span in rendered.spans if span[0] < span[1]]
        if not spans:
            raise UnsuitableTemplateError("the template marks nothing of it as generated", "data.answers=apart")
        answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        learned = [conversation.is_learned[i] for i in answers]
        if not all(learned):
            if len(spans) != len(answers):
                what = f"the template marks {len(spans)} parts of {len(answers)} answers, of which some are not learned"
                raise ValueError(what, "data.answers=apart")
            spans = [span for span, is_learned in zip(spans, learned, strict=True) if is_learned]
        return _Text(rendered.text, spans, True)

    def _by_prefixes(self, conversation: Conversation) -> _Text:
        """The conversation, where each answer lies between the prompt before it and the text up to it."""
        whole = self._rendered(conversation, len(conversation.messages), answers=False).text
        spans = []
        for at in np.flatnonzero(conversation.is_learned).tolist():
            text, [(start, end)], _ = self._answer(conversation, at)
            if not whole.startswith(text):
                shown = f"message {at + 1} is {_differing(whole, text)}"
                what = f"the template writes an answer in another way when the conversation goes on: {shown}"
                raise UnsuitableTemplateError(
                    what, "data.answers=apart, for which each answer is an example of its own"
                )
            spans.append((start, end))
        return _Text(whole, spans, False)

    def _answer(self, conversation: Conversation, at: int) -> _Text:
        """The conversation up to an answer, of which the answer is learned."""
        prompt = self._rendered(conversation, at, answers=True).text
        text = self._rendered(conversation, at + 1, answers=False).text
        if not text.startswith(prompt):
            what = "the template does not write an answer after the prompt that asks for it"
            raise UnsuitableTemplateError(
                f"{what}: message {at + 1} is {_differing(text, prompt)}",
                "mark the answers in the template, by {% generation %} and {% endgeneration %}",
            )
        return _Text(text, [(len(prompt), len(text))], False)

    def _rendered(self, conversation: Conversation, number: int, answers: bool) -> Any:
        options = self.options | dict(conversation.options)
        return self.template.rendered(
            conversation.messages[:number], tools=conversation.tools, answers=answers, date=self.date, options=options
        )

    def _tokens(self, rendered: _Text) -> Encoded:
        """A token that overlaps a span is learned, as in transformers' mask of the assistant's tokens."""
        ids, places = self.tokenizer.encode_with_places(rendered.text)
        is_learned = np.zeros(len(ids), bool)
        for start, end in rendered.spans:
            inside = np.flatnonzero((places[:, 1] > start) & (places[:, 0] < end))
            if not rendered.is_marked:
                inside = inside[: self._until_end(ids[inside])]
            is_learned[inside] = True
        return Encoded(ids, is_learned)

    def _until_end(self, ids: np.ndarray) -> int:
        """The number of tokens up to the first at which the model stops, with it."""
        return min(len(ids), 1 + sum(1 for _ in takewhile(lambda i: i not in self.ends, ids.tolist())))


def _differing(text: str, other: str) -> str:
    """The first place where two texts differ."""
    at = next(i for i in count() if text[i : i + 1] != other[i : i + 1])
    begin = max(0, at - AROUND)
    return " and ".join(excerpt(repr(one[begin : at + AROUND])) for one in (text, other))
