"""Masked tokens, as in BERT: the model restores tokens that were hidden from it."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax
from pydantic import Field

from meshpar.config import Count
from meshpar.data.rows.spec import COUNTED
from meshpar.errors import ConfigError
from meshpar.parallel.precision import wide
from meshpar.train.loss import Batch, LossSums
from meshpar.train.tasks.base import NamedLoss, label_of, only_array

EVALUATION_SEED = 0


class MaskedTokens(NamedLoss):
    """Cross entropy of tokens that are hidden from the model, which returns logits [rows, seq, vocab].

    Of the tokens that are chosen, 80 % become `mask_id`, 10 % a random token and 10 % stay as they are. A step draws
    them anew; an evaluation draws the same ones each time, by the place of a row in its batch.

    Source: Devlin et al. 2018, arXiv:1810.04805.
    """

    kind: Literal["masked_tokens"] = "masked_tokens"
    tokens: str = "tokens"
    """The array of token ids, [seq] in a row."""
    mask_id: Count
    """The token that stands for a hidden one."""
    pad_id: Count | None = None
    """The token that fills rows, which is never chosen."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 0.15
    """The fraction of the tokens that is chosen."""
    vocab_size: Annotated[int, Field(gt=1)]
    """Random tokens are below it. The model may have more logits."""

    @property
    def labels(self) -> tuple[str, ...]:
        return ()

    def inputs(self, batch: Batch, key: jax.Array | None) -> tuple[Batch, Any]:
        tokens = label_of(batch, self.tokens, "tokens")
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ConfigError(f"loss.tokens = {self.tokens}: it is {tokens.dtype}{list(tokens.shape)}, not [rows, seq]")
        key = jax.random.key(EVALUATION_SEED) if key is None else key
        choice, kind, other = jax.random.split(key, 3)
        is_chosen = jax.random.uniform(choice, tokens.shape) < self.fraction
        if self.pad_id is not None:
            is_chosen &= tokens != self.pad_id
        kinds = jax.random.uniform(kind, tokens.shape)
        drawn = jax.random.randint(other, tokens.shape, 0, self.vocab_size, tokens.dtype)
        hidden = jnp.where(kinds < 0.8, jnp.asarray(self.mask_id, tokens.dtype), jnp.where(kinds < 0.9, drawn, tokens))
        given, _ = super().inputs(batch, key)
        return given | {self.tokens: jnp.where(is_chosen, hidden, tokens)}, is_chosen

    def sums(self, outputs: Any, batch: Batch, more: Any, is_training: bool) -> LossSums:
        tokens = batch[self.tokens].astype(jnp.int32)
        logits = wide(only_array(outputs, "logits [rows, seq, vocab]", 3))
        is_target = more & (batch[COUNTED] > 0)[:, None]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        is_right = (logits.argmax(-1).astype(jnp.int32) == tokens).astype(losses.dtype)
        total, right = (jnp.where(is_target, x, jnp.zeros_like(x)).sum() for x in (losses, is_right))
        return LossSums(total, is_target.sum(dtype=jnp.int32), {"accuracy": right})

    def of_means(self, means: Any) -> dict[str, float]:
        return {"perplexity": math.exp(means["loss"])}

    def bounds(self, outputs: Any) -> dict[str, int]:
        return {self.tokens: only_array(outputs, "logits [rows, seq, vocab]", 3).shape[-1]}
