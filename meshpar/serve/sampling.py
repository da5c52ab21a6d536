"""Samples the next token from the logits, with the same result on every mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from meshpar.errors import ConfigError, Problems
from meshpar.parallel.context import constrain, manual_axes
from meshpar.parallel.local import shard
from meshpar.parallel.precision import wide
from meshpar.serve import vocabulary


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is sampled.

    Args:
      temperature: divides the logits; 0 selects the most probable token.
      top_k: sample from the k most probable tokens; None for all.
      top_p: of these, sample from the most probable ones that together have this probability; 1 for all.
      min_p: of these, sample from those with at least this fraction of the largest probability; 0 for all.
      seed: seed of the random draws. They depend only on it, the row and the position: not on mesh or batch size.

    Raises:
      ConfigError: lists all invalid values.

    Numerics: at least float32. Tokens as probable as the last one within top_k or top_p are included too.

    Source: Fan et al. 2018, arXiv:1805.04833 (top-k); Holtzman et al. 2019, arXiv:1904.09751 (top-p); Nguyen et al.
    2024, arXiv:2407.01082 (min-p).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        problems = Problems()
        if not 0 <= self.temperature < float("inf"):
            problems.add("temperature", f"{self.temperature} is not 0 or more", "0 selects the most probable token")
        if self.top_k is not None and self.top_k < 1:
            problems.add("top_k", f"{self.top_k} is not 1 or more", "leave it out for all tokens")
        if not 0 < self.top_p <= 1:
            problems.add("top_p", f"{self.top_p} is not a probability above 0", "1 for all tokens")
        if not 0 <= self.min_p <= 1:
            problems.add("min_p", f"{self.min_p} is not a fraction", "0 for all tokens")
        if not 0 <= self.seed < 2**32:
            problems.add("seed", f"{self.seed} is not in [0, 2^32)", "0")
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1 or self.min_p):
            what = "temperature 0 selects the most probable token, whatever top_k, top_p and min_p are"
            problems.add("temperature", what, "1, to sample from the model's probabilities")
        problems.raise_any(ConfigError, "these settings of sampling are invalid:")


def sample(
    logits: Float[Array, "B V"], rows: Int[Array, "B"], positions: Int[Array, "B"], how: Sampling, vocab_size: int
) -> Int[Array, "B"]:
    """The next token of each row, the same on every device that holds the row.

    A draw is the argmax of the logits plus Gumbel noise, which does not gather a sharded vocabulary.

    Args:
      logits: [batch, vocab], local shard.
      rows: int32 [batch], indices in the global batch.
      positions: int32 [batch], the positions of the tokens that are drawn.
      vocab_size: ids from here on are padding, and never drawn.

    Communication: that of `vocabulary.argmax`, and with top_k or top_p that of `vocabulary.top`.
    """
    logits = of_tokens(logits, vocab_size)
    if how.temperature == 0:
        return vocabulary.argmax(logits)
    logits /= how.temperature
    if how.top_k is not None or how.top_p < 1 or how.min_p:
        best = vocabulary.top(logits, how.top_k or vocab_size)
        least = _least_kept(best, how.top_p)
        if how.min_p:
            least = jnp.maximum(least, best[:, :1] + math.log(how.min_p))
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return vocabulary.argmax(logits + _noise(logits, rows, positions, how.seed))


class Asked(NamedTuple):
    """What any row of a turn asks for, bool[] each: the same on all devices. What nobody asks for is not computed.

    Args:
      draws: a temperature above 0.
      adjusts: biases or penalties of tokens.
      scores: log-probabilities.
      limits: only some of the tokens, by a grammar.
    """

    draws: Any
    adjusts: Any
    scores: Any
    limits: Any


class RowSampling(NamedTuple):
    """A `Sampling` for each row. Where all rows have the same one, which the program knows, there are only `rows`.

    Args:
      temperature, top_p, min_p: float32[batch].
      top_k: int32[batch]; 0 for all.
      seed: uint32[batch].
      rows: int32[batch]. The index of each row among those with its seed.
      adjusted: int32[batch, most]. Tokens whose logits are adjusted, see `Adjustment`.
      factors, added: float32[batch, most]. Their changes; 1 and 0 where there are fewer.
      allowed: int32[batch, words]. A bit for each token of the vocabulary, the lowest of the first word first; 0 for a
        token that may not be drawn.
    """

    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    seed: Any = None
    rows: Any = None
    adjusted: Any = None
    factors: Any = None
    added: Any = None
    allowed: Any = None

    @classmethod
    def structs(cls, per_row: Callable[..., jax.ShapeDtypeStruct], most: int, vocab_size: int) -> RowSampling:
        """The structs of its arrays.

        Args:
          per_row: (shape of a row, dtype) -> a struct.
          most: the most tokens that a row adjusts.
        """
        fractions, numbers = per_row(dtype=jnp.float32), per_row(dtype=jnp.int32)
        adjusted, changes = per_row(most, dtype=jnp.int32), per_row(most, dtype=jnp.float32)
        seeds = per_row(dtype=jnp.uint32)
        allowed = per_row(num_words(vocab_size), dtype=jnp.int32)
        return cls(fractions, numbers, fractions, fractions, seeds, numbers, adjusted, changes, changes, allowed)


def num_words(vocab_size: int) -> int:
    """Words of 32 bits with a bit for each token."""
    return -(-vocab_size // 32)


def sample_each(
    logits: Float[Array, "B V"], positions: Int[Array, "B"], how: RowSampling, asked: Asked, vocab_size: int
) -> Int[Array, "B"]:
    """`sample` with settings for each row, which are arrays of a compiled program.

    Communication: that of `vocabulary.argmax`, and if a row draws an all-gather of the logits.
    """

    def drawn(logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        temperature = how.temperature[:, None].astype(logits.dtype)
        is_drawn = temperature > 0
        scaled = logits / jnp.where(is_drawn, temperature, jnp.ones_like(temperature))
        best = vocabulary.top(scaled, vocab_size)
        top_k = jnp.where(how.top_k > 0, how.top_k, vocab_size)[:, None]
        best = jnp.where(jnp.arange(best.shape[-1], dtype=jnp.int32) < top_k, best, -jnp.inf)
        least = _least_kept(best, how.top_p[:, None].astype(best.dtype))
        least = jnp.maximum(least, best[:, :1] + jnp.log(how.min_p[:, None].astype(best.dtype)))
        kept = jnp.where(scaled >= least, scaled, -jnp.inf)
        return jnp.where(is_drawn, kept + _noise(kept, how.rows, positions, how.seed), logits)

    logits = of_tokens(logits, vocab_size)
    logits = jax.lax.cond(asked.adjusts, partial(_adjusted, how=how), lambda logits: logits, logits)
    logits = jax.lax.cond(asked.limits, partial(_limited, how=how), lambda logits: logits, logits)
    return vocabulary.argmax(jax.lax.cond(asked.draws, drawn, lambda logits: logits, logits))


def _adjusted(logits: Float[Array, "B V"], how: RowSampling) -> Float[Array, "B V"]:
    """The logits with the changes of each row's single tokens."""
    axes = manual_axes("vocab")
    width = logits.shape[-1]
    ids = how.adjusted - (jax.lax.axis_index(axes) * width if axes else 0)
    ids = jnp.where((ids >= 0) & (ids < width), ids, width)  # those of other shards are dropped
    rows = jnp.arange(len(logits), dtype=jnp.int32)[:, None]
    found = logits.at[rows, ids].get(mode="fill", fill_value=0)
    factors = how.factors.astype(logits.dtype)
    scaled = jnp.where(found > 0, found / factors, found * factors)
    return logits.at[rows, ids].add(scaled - found + how.added.astype(logits.dtype), mode="drop")


def _limited(logits: Float[Array, "B V"], how: RowSampling) -> Float[Array, "B V"]:
    """The logits, -inf for tokens that a row may not draw."""
    axes = manual_axes("vocab")
    first = jax.lax.axis_index(axes) * logits.shape[-1] if axes else 0
    ids = first + jnp.arange(logits.shape[-1], dtype=jnp.int32)
    words = jnp.take(how.allowed, ids // 32, axis=1, mode="clip")  # padding of the vocabulary is -inf already
    return jnp.where((words >> (ids % 32)) & 1 == 1, logits, -jnp.inf)


def of_tokens(logits: Float[Array, "B V"], vocab_size: int) -> Float[Array, "B V"]:
    """The logits in float32 at least, -inf for padding of the vocabulary."""
    axes = manual_axes("vocab")
    first = jax.lax.axis_index(axes) * logits.shape[-1] if axes else 0
    is_token = first + jnp.arange(logits.shape[-1], dtype=jnp.int32) < vocab_size
    return jnp.where(is_token, wide(logits), -jnp.inf)


def _least_kept(best: Float[Array, "B K"], top_p: float | Float[Array, "B 1"]) -> Float[Array, "B 1"]:
    """The smallest logit of the smallest set of most probable tokens with probability `top_p`; `best` descends."""
    probabilities = jax.nn.softmax(best, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # In float32 the sum may reach 1 before the last token, and a small top_p may be 0.
    is_kept = ((before < top_p) | (top_p == 1) | (before <= 0)) & (best > -jnp.inf)
    return jnp.where(is_kept, best, jnp.inf).min(-1, keepdims=True)


def _noise(
    like: Float[Array, "B V"], rows: Int[Array, "B"], positions: Int[Array, "B"], seed: int | Int[Array, "B"]
) -> jax.Array:
    """Gumbel noise for each row and position. A device draws that of the whole vocabulary and selects its shard."""
    axes = manual_axes("vocab")
    size = like.shape[-1] * (jax.lax.axis_size(axes) if axes else 1)

    def draw(row: Int[Array, ""], position: Int[Array, ""], seed: Any) -> Float[Array, "V"]:
        key: PRNGKeyArray = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), position)
        return jax.random.gumbel(key, (size,), like.dtype)

    of_rows = jax.vmap(draw, (0, 0, None if isinstance(seed, int) else 0))(rows, positions, seed)
    return constrain(shard(of_rows, axes, 1), "batch", "vocab")
