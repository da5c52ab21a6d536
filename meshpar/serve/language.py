"""The texts of a model: its tokenizer, and the ids that open prompts and end answers."""

from __future__ import annotations

from dataclasses import dataclass

from meshpar.data.tokenizer import Tokenizer, TokenizerFile


@dataclass(frozen=True)
class Language:
    """A tokenizer, the ids before every prompt, and the ids that end an answer."""

    tokenizer: Tokenizer
    opening: tuple[int, ...]
    ends: frozenset[int] = frozenset()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Language:
        """Of a tokenizer whose documents are opened and closed by its ids."""
        ids = (tokenizer.bos, tokenizer.eos)
        return cls(tokenizer, (tokenizer.bos,), frozenset(one for one in ids if one is not None))

    def encode(self, prompt: str, parse_special: bool = True) -> list[int]:
        """The tokens of a prompt, with those that open it.

        Args:
          parse_special: whether the text of a special token is that token; otherwise it is its characters.
        """
        tokenizer = self.tokenizer
        is_file = isinstance(tokenizer, TokenizerFile)
        ids = tokenizer.encode_special(prompt) if is_file and parse_special else tokenizer.encode(prompt)
        return [*self.opening, *ids.tolist()]
