"""Log-probabilities of given tokens, and the most probable tokens beside them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from meshpar.parallel.precision import wide
from meshpar.serve import vocabulary
from meshpar.serve.sampling import of_tokens

MOST_RANKED = 20
"""The most tokens beside a given one, as in OpenAI's API."""


class TokenScores(NamedTuple):
    """Of the model's own probabilities: before temperature, biases and penalties.

    Args:
      logprob: float [...]. Of the given tokens.
      ids: int32 [..., ranked]. The most probable tokens, the first most of all.
      logprobs: float [..., ranked].
    """

    logprob: Any
    ids: Any
    logprobs: Any


class TokenScore(NamedTuple):
    """`TokenScores` of one token, on the host."""

    logprob: float
    ids: list[int]
    logprobs: list[float]


def score(
    logits: Float[Array, "B V"], tokens: Int[Array, "B"], is_asked: Bool[Array, ""], vocab_size: int
) -> TokenScores:  # fmt: skip
    """The scores of a token of each row; zeros if nobody asks for them.

    Communication: if it is asked for, all-reduces of [batch], and all-gathers of the `MOST_RANKED` best of each shard.
    """
    num = min(MOST_RANKED, vocab_size)

    def computed(logits: Float[Array, "B V"]) -> TokenScores:
        logits = of_tokens(logits, vocab_size)
        best, ids = vocabulary.top_ids(logits, num)
        total = vocabulary.log_total(logits)
        return TokenScores(vocabulary.logit_of(logits, tokens) - total, ids, best - total[:, None])

    def nothing(logits: Float[Array, "B V"]) -> TokenScores:
        zeros = 0 * tokens  # on the devices as the tokens are
        several = jnp.repeat(zeros[:, None], num, axis=1)
        dtype = wide(logits).dtype
        return TokenScores(zeros.astype(dtype), several, several.astype(dtype))

    return jax.lax.cond(is_asked, computed, nothing, logits)
