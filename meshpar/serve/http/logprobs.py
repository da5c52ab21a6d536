"""Log-probabilities in the forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshpar.data.tokenizer import Tokenizer, TokenizerFile
from meshpar.serve.answer import Answer
from meshpar.serve.scores import TokenScore


class TokenText(NamedTuple):
    """The text of a token, or its name in the tokenizer if it is a part of a character, or special."""

    text: str
    is_name: bool = False


class Token(NamedTuple):
    """A token of a text, as it is reported.

    Args:
      offset: where the text begins in that of all.
      logprob: None of the first token of a prompt, before which there is nothing.
      ranked: the most probable tokens at its place, the first most of all.
    """

    text: TokenText
    offset: int
    logprob: float | None
    ranked: list[tuple[TokenText, float]]


@dataclass(frozen=True)
class Texts:
    """The texts of tokens.

    Args:
      num_ranked: how many of the most probable tokens are reported; None if none are scored.
    """

    tokenizer: Tokenizer
    num_ranked: int | None

    def after(self, before: Sequence[int], token: int) -> TokenText:
        """The text of a token, which may depend on the one before it, as a word's first space does."""
        context = list(before[-1:])
        text = self.tokenizer.decode([*context, token])[len(self.tokenizer.decode(context)) :]
        if (not text or "\ufffd" in text) and isinstance(self.tokenizer, TokenizerFile):
            return TokenText(self.tokenizer.token(token) or "", is_name=True)
        return TokenText(text)

    def tokens(self, before: Sequence[int], ids: Sequence[int], scores: Sequence[TokenScore | None]) -> Iterator[Token]:
        """The tokens that follow others, with their scores."""
        lasts = [before[-1:], *([token] for token in ids)][: len(ids)]
        for last, token, offset, score in zip(lasts, ids, self._offsets(before, ids), scores, strict=True):
            ranked = zip(score.ids, score.logprobs, strict=True) if score else ()
            best = [(self.after(last, i), value) for i, value in list(ranked)[: self.num_ranked]]
            yield Token(self.after(last, token), offset, score and score.logprob, best)

    def _offsets(self, before: Sequence[int], ids: Sequence[int]) -> Iterator[int]:
        """Where the text of each token begins in that of all, after the tokens before."""
        decoded = Answer(self.tokenizer, (), len(ids) + 1, (), before)
        for token in ids:
            yield len(decoded.text)
            decoded.add(token)

    def completion(
        self, answer: Answer, prompt: Sequence[int], echoes: bool, first: int = 0, last: int | None = None
    ) -> dict[str, Any] | None:
        """The `logprobs` of a choice of `/v1/completions`; None if they are not asked for.

        Args:
          first, last: the tokens of a piece of the answer.
        """
        if self.num_ranked is None:
            return None
        shown = slice(self._num_shown(answer, prompt, last))
        scored = list(self.tokens(prompt, answer.tokens[shown], answer.scores[shown]))
        if echoes:
            whole = [*prompt, *answer.tokens[shown]]
            scored = list(self.tokens((), whole, [None, *answer.prompt_scores, *answer.scores[shown]]))
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in scored:
            found["tokens"].append(one.text.text)
            found["token_logprobs"].append(one.logprob)
            found["top_logprobs"].append(None if one.logprob is None else _by_text(one))
            found["text_offset"].append(one.offset)
        return {key: values[first:] for key, values in found.items()}

    def chat(
        self, answer: Answer, prompt: Sequence[int], first: int = 0, last: int | None = None
    ) -> dict[str, Any] | None:
        """As `completion`, of a choice of `/v1/chat/completions`."""
        if self.num_ranked is None:
            return None
        shown = slice(first, self._num_shown(answer, prompt, last))
        tokens = self.tokens([*prompt, *answer.tokens[:first]], answer.tokens[shown], answer.scores[shown])
        return {"content": [_in_chat(one) for one in tokens], "refusal": None}

    def _num_shown(self, answer: Answer, prompt: Sequence[int], last: int | None) -> int:
        """How many of the first tokens are part of the text: those of a stop string are not."""
        last = len(answer.tokens) if last is None else last
        if answer.finish != "stop":
            return last
        return sum(offset < len(answer.text) for offset in self._offsets(prompt, answer.tokens[:last]))


def _by_text(token: Token) -> dict[str, float]:
    """The most probable tokens, and the token itself, which may be none of them."""
    found: dict[str, float] = {}
    for (text, _), logprob in [*token.ranked, (token.text, token.logprob or 0.0)]:
        found.setdefault(text, logprob)
    return found


def _in_chat(token: Token) -> dict[str, Any]:
    ranked = [_with_bytes(text, logprob) for text, logprob in token.ranked]
    return _with_bytes(token.text, token.logprob) | {"top_logprobs": ranked}


def _with_bytes(text: TokenText, logprob: float | None) -> dict[str, Any]:
    """The bytes of a name are not known."""
    return {"token": text.text, "logprob": logprob, "bytes": None if text.is_name else list(text.text.encode())}
