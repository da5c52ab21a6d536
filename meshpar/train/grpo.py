"""GRPO: the model answers prompts, a function rewards the answers, and the model learns the better ones.

A row of a batch is a prompt and one of the answers that the model wrote to it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field

from meshpar.config import Positive, Target
from meshpar.parallel.batch import Batch
from meshpar.sharding.spec import ArraySpec
from meshpar.train import token_loss
from meshpar.train.preferences import OfAnswers

ADVANTAGES, REWARDS, LOG_PROBS = "advantages", "rewards", "old_log_probs"


class GRPO(OfAnswers):
    """Group relative policy optimization: of several answers to a prompt, the model learns those with higher rewards.

    An answer's advantage is its reward minus the mean of its group, over their standard deviation; 0 where all rewards
    are equal. The loss of an answer is the mean over its tokens of

        beta * (r - log(r) - 1) - min(p * advantage, clip(p, 1 - clip, 1 + clip) * advantage)

    `p` is the token's probability over the one with which it was sampled, and `r` that of the reference model over the
    model's. The reference is the model at the start of the run: with LoRA the model without it, else a second copy.
    Answers are sampled at temperature 1 from the parameters of the training, on its mesh.

    Source: Shao et al. 2024, arXiv:2402.03300, equations 3 and 4.
    """

    kind: Literal["grpo"] = "grpo"
    reward: Target
    """`package.module:name` of a function (answers, lines) -> a number for each: texts, and the objects in their
    prompts' lines."""
    group: Annotated[int, Field(ge=2)] = 8
    """Answers to a prompt. `data.batch_size` counts answers."""
    max_tokens: Positive = 64
    """Most tokens of an answer. `data.seq_len` has to hold the prompt too."""
    clip: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """How far a probability may move from that of the sampling."""
    beta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.04
    """Larger values keep the model nearer to the reference; 0 for no reference."""
    updates: Positive = 1
    """Steps that train on the same answers, of which the first samples."""

    @property
    def has_reference(self) -> bool:
        """Whether it compares the model with the one that it was at first."""
        return self.beta > 0

    def arrays(self, batch_size: int, seq_len: int) -> dict[str, ArraySpec]:
        """The specs of the arrays of a batch besides those of packed tokens."""
        of_rows = ArraySpec((batch_size,), np.dtype(np.float32), ("batch",))
        of_tokens = ArraySpec((batch_size, seq_len), np.dtype(np.float32), ("batch", "seq"))
        return {ADVANTAGES: of_rows, REWARDS: of_rows, LOG_PROBS: of_tokens}

    @property
    def own_arrays(self) -> tuple[str, ...]:
        return ADVANTAGES, REWARDS, LOG_PROBS

    def read(self, logits: jax.Array, batch: Batch, vocab_size: int) -> jax.Array:
        """The log-probabilities of the targets, float[rows, seq]; of any token where there is none."""
        return -token_loss.cross_entropy(logits, jnp.maximum(batch["targets"], 0), vocab_size)

    def summed(self, new: Any, base: Any, batch: Batch) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        each, metrics = self.of_tokens(new, base, batch)
        is_answer = batch["targets"] >= 0
        sizes = is_answer.sum(-1).astype(each.dtype)

        def mean_of_answers(x: jax.Array) -> jax.Array:
            total = jnp.where(is_answer, x, jnp.zeros_like(x)).sum(-1)
            return (total / jnp.maximum(sizes, jnp.ones_like(sizes))).sum()

        total, sums = jax.tree.map(mean_of_answers, (each, metrics))
        rewards = jnp.where(sizes > 0, batch[REWARDS].astype(each.dtype), jnp.zeros_like(sizes)).sum()
        count = (sizes > 0).sum(dtype=jnp.int32)
        return total, count, sums | {"reward": rewards, "answer_tokens": sizes.sum()}

    def of_tokens(self, new: jax.Array, base: jax.Array | None, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of each token, and its metrics.

        Args:
          new, base: the log-probabilities of the model and of the reference, float[rows, seq].
        """
        ratio = jnp.exp(new - batch[LOG_PROBS].astype(new.dtype))
        advantages = batch[ADVANTAGES].astype(new.dtype)[:, None]
        low, high = (jnp.asarray(1 + sign * self.clip, new.dtype) for sign in (-1, 1))
        clipped = jnp.clip(ratio, low, high) * advantages
        each = -jnp.minimum(ratio * advantages, clipped)
        metrics = {"clipped": (clipped < ratio * advantages).astype(new.dtype)}
        if base is not None:
            away = jnp.exp(base - new) - (base - new) - 1
            each += self.beta * away
            metrics["kl"] = away
        return each, metrics


def advantages_of(rewards: np.ndarray, group: int) -> np.ndarray:
    """The advantage of each answer: rewards minus their group's mean, over its standard deviation.

    >>> advantages_of(np.array([1.0, 0.0, 1.0, 0.0, 0.5, 0.5]), 2).tolist()
    [1.0, -1.0, 1.0, -1.0, 0.0, 0.0]
    """
    groups = rewards.reshape(-1, group)
    centred = groups - groups.mean(-1, keepdims=True)
    deviation = groups.std(-1, keepdims=True)
    is_equal = np.ptp(groups, -1, keepdims=True) == 0  # whose computed deviation may differ from zero
    return np.where(is_equal, 0.0, centred / np.where(is_equal, 1.0, deviation)).reshape(-1)
