"""What a request adds to the logits of single tokens: biases, and penalties for tokens that its answer has already."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MOST_BIASED = 300
"""The most tokens with a bias, as in OpenAI's API."""


@dataclass(frozen=True, kw_only=True)
class Adjustment:
    """Added to the logits before the temperature divides them, so greedy answers change too.

    Args:
      bias: token -> what is added.
      presence: subtracted from each token that the answer has.
      frequency: subtracted from a token as often as the answer has it.

    Source: OpenAI's API reference: `logits[j] -= count[j] * frequency + (count[j] > 0) * presence`.

    >>> Adjustment(bias={7: 2.0}, presence=0.5, frequency=0.25).of([3, 7, 7])
    {7: 1.0, 3: -0.75}
    """

    bias: Mapping[int, float] = field(default_factory=dict)
    presence: float = 0.0
    frequency: float = 0.0

    @property
    def changes(self) -> bool:
        """Whether it depends on the answer."""
        return bool(self.presence or self.frequency)

    def of(self, answer: Sequence[int]) -> dict[int, float]:
        """Token -> what is added to its logit after these tokens of the answer."""
        added = dict(self.bias)
        if self.changes:
            for token, count in Counter(answer).items():
                added[token] = added.get(token, 0.0) - self.presence - self.frequency * count
        return added


NOTHING = Adjustment()


def most_adjusted(vocab_size: int, max_len: int) -> int:
    """The most tokens that a row adjusts."""
    return min(vocab_size, max_len + MOST_BIASED)
