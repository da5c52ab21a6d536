"""Limits answers to a grammar, a regular expression or a JSON schema, by the library llguidance.

Its parser takes no exponential time: each of its steps has a limit, beyond which the answer ends with an error.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np

from meshpar.data.tokenizer import Tokenizer, TokenizerFile
from meshpar.errors import ConfigError, excerpt
from meshpar.serve.sampling import num_words


def written_closely(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON schema, whose texts have the spaces of `json.dumps`: with any, some models would write them for ever."""
    spaces = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return {**schema, "x-guidance": spaces}


@dataclass(frozen=True)
class Grammars:
    """Reads grammars for the tokens of a model; needs the extra `structured`.

    Args:
      vocab_size: the tokens of the model.
      ends: the ids that end an answer, at least one.
    """

    tokenizer: Tokenizer
    vocab_size: int
    ends: Collection[int]

    def of_schema(self, schema: Mapping[str, Any]) -> Grammar:
        """The JSON texts of a schema.

        Raises:
          ConfigError: it is no JSON schema, has a key that would not be enforced, or is too complex.
        """
        return Grammar(self, json.dumps({"grammars": [{"json_schema": written_closely(schema)}]}))

    def of_regex(self, pattern: str) -> Grammar:
        """The texts that match as a whole; without lookahead and references."""
        self._check_extra()
        from llguidance import LLMatcher

        return Grammar(self, LLMatcher.grammar_from_regex(pattern))

    def of_lark(self, text: str) -> Grammar:
        """The texts of a grammar in Lark's form."""
        return Grammar(self, text)

    @cached_property
    def tokens(self) -> Any:
        """The tokens, as llguidance has them."""
        self._check_extra()
        if not isinstance(self.tokenizer, TokenizerFile) or not self.ends:
            raise ConfigError("a grammar needs a tokenizer.json, and an id that ends an answer; the model has none")
        from llguidance import LLTokenizer

        return LLTokenizer(self.tokenizer.as_json(), n_vocab=self.vocab_size, eos_token=sorted(self.ends))

    def _check_extra(self) -> None:
        if not find_spec("llguidance"):
            raise ConfigError("llguidance: not installed on the server; pip install 'meshpar[structured]'")


class Grammar:
    """A grammar that is checked.

    Raises:
      ConfigError: it has an error.
    """

    def __init__(self, grammars: Grammars, text: str):
        tokens = grammars.tokens
        from llguidance import LLMatcher

        self.vocab_size = grammars.vocab_size
        self._matcher = LLMatcher(tokens, text, log_level=0)
        if error := self._matcher.get_error():
            raise ConfigError(f"the grammar cannot be followed: {excerpt(error.strip(), 500)}")
        first = self.constraint()
        if not first.allowed(()).any() or first.error:
            raise ConfigError("the grammar cannot be followed: it matches no text, or takes too long to begin one")

    def constraint(self) -> Constraint:
        """The state of one answer."""
        return Constraint(self._matcher.deep_copy(), self.vocab_size)


class Constraint:
    """The state of an answer that follows a grammar."""

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher = matcher
        self._num_read = 0
        self._words = np.zeros((1, num_words(vocab_size)), np.int32)

    def allowed(self, answer: Sequence[int]) -> np.ndarray:
        """int32[words]: a bit for each token that may follow; none after an error."""
        from llguidance.numpy import fill_next_token_bitmask

        for token in answer[self._num_read :]:
            self._matcher.consume_token(token)
        self._num_read = len(answer)
        if self._matcher.is_error():
            self._words.fill(-1)
        else:
            fill_next_token_bitmask(self._matcher, self._words, 0)
        return self._words[0].copy()

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any more, such as that a step took too long."""
        return excerpt(self._matcher.get_error().partition("\n")[0], 500) if self._matcher.is_error() else None
