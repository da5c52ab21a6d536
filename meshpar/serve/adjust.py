"""How a request changes the logits of single tokens: biases, and penalties for tokens that there are already."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_BIASED = 300
"""The most tokens with a bias, as in OpenAI's API."""


class LogitChange(NamedTuple):
    """Of a token's logit: a positive one is divided by `factor`, a negative one multiplied; then `added` is added."""

    factor: float
    added: float


@dataclass(frozen=True, kw_only=True)
class Adjustment:
    """Changes logits before the temperature divides them, so greedy answers change too.

    Args:
      bias: token -> what is added.
      presence: subtracted from each token that the answer has.
      frequency: subtracted from a token as often as the answer has it.

      repetition: the factor of tokens that the prompt or the answer has.

    Sources: OpenAI's API reference: `logits[j] -= count[j] * frequency + (count[j] > 0) * presence`; for the repetition
    Keskar et al. 2019, https://arxiv.org/abs/1909.05858, and for negative logits transformers.

    >>> Adjustment(bias={7: 2.0}, presence=0.5, frequency=0.25).of([4], [7, 7])
    {7: LogitChange(factor=1.0, added=1.0)}
    >>> Adjustment(repetition=1.5).of([4], [])
    {4: LogitChange(factor=1.5, added=0.0)}
    """

    bias: Mapping[int, float] = field(default_factory=dict)
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0

    @property
    def changes(self) -> bool:
        """Whether it depends on the answer."""
        return bool(self.presence or self.frequency or self.repetition != 1)

    def of(self, prompt: Sequence[int], answer: Sequence[int]) -> dict[int, LogitChange]:
        """Token -> the change of its logit after the tokens of a prompt, and of its answer so far."""
        added = dict(self.bias)
        if self.presence or self.frequency:
            for token, count in Counter(answer).items():
                added[token] = added.get(token, 0.0) - self.presence - self.frequency * count
        repeated = {*prompt, *answer} if self.repetition != 1 else set()
        factor = lambda token: self.repetition if token in repeated else 1.0
        return {
            token: LogitChange(factor(token), added.get(token, 0.0)) for token in {**added, **dict.fromkeys(repeated)}
        }


NOTHING = Adjustment()


def most_adjusted(vocab_size: int, max_len: int) -> int:
    """The most tokens that a row adjusts."""
    return min(vocab_size, max_len + MOST_BIASED)
