"""Losses of preferences: of two answers to a prompt, the model learns to prefer the chosen one to the rejected one.

A row of a batch is a pair. Its tokens of segment 1 are the prompt and the chosen answer, those of segment 2 the prompt
and the rejected answer; neither attends to the other. So microbatches and devices have whole pairs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from pydantic import Field

from meshpar.config import Config
from meshpar.parallel import data
from meshpar.parallel.batch import Batch
from meshpar.parallel.outputs import Outputs
from meshpar.train import token_loss
from meshpar.train.loss import Loss, LossSums
from meshpar.train.state import StatePlacement
from meshpar.train.strategy import Strategy

REFERENCE = "reference"
"""The key in the carried state of the parameters with which a run began, where the loss compares with them."""
CHOSEN, REJECTED = 1, 2
"""The segments of a row."""
Reference = Callable[[Any, Any], Any]
"""(parameters, carried state) -> the parameters of the reference model."""


class PairedAnswers(NamedTuple):
    """Of both answers of each pair, the chosen one first: float[rows, 2].

    Args:
      log_probs: the sum of the log-probabilities of the answer's tokens.
      sizes: the number of these tokens.
    """

    log_probs: jax.Array
    sizes: jax.Array

    @property
    def are_pairs(self) -> jax.Array:
        """bool[rows]: whether the row has both answers; a row that fills the last batch has none."""
        return (self.sizes > 0).all(-1)

    @property
    def means(self) -> jax.Array:
        """The mean log-probability of a token of each answer."""
        return self.log_probs / jnp.maximum(self.sizes, jnp.ones_like(self.sizes))


class OfAnswers(Config):
    """A loss of whole answers, whose mean is over rows, in evaluations too."""

    target: ClassVar[None] = None

    @property
    @abstractmethod
    def has_reference(self) -> bool:
        """Whether it compares the model with the one that it was at first."""

    @property
    def own_arrays(self) -> tuple[str, ...]:
        """The arrays of a batch that are the loss's own, and not the model's."""
        return ()

    @abstractmethod
    def read(self, logits: jax.Array, batch: Batch, vocab_size: int) -> Any:
        """What it needs of a model's logits: log-probabilities."""

    @abstractmethod
    def summed(self, new: Any, base: Any, batch: Batch) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """The sum of the losses of rows, the number of rows that count, and sums of metrics over these.

        Args:
          new, base: what `read` returned for the model, and for the reference; None without one.
        """

    def build(
        self, apply: Callable[..., Outputs], vocab_size: int, reference: Reference | None, adds_auxiliary: bool
    ) -> Loss:
        """The loss of a step; or without the model's auxiliary losses, which are only reported, of an evaluation."""

        def loss(params: Any, batch: Batch, key: jax.Array | None, carried: Any) -> LossSums:
            of_model = {name: x for name, x in batch.items() if name not in self.own_arrays}
            outputs = apply(params, of_model, key)
            new, base = self.read(outputs.logits, batch, vocab_size), None
            if reference is not None:
                frozen = lax.stop_gradient(reference(params, carried))
                base = lax.stop_gradient(self.read(apply(frozen, of_model, None).logits, batch, vocab_size))
            total, count, sums = self.summed(new, base, batch)
            if adds_auxiliary:
                total = outputs.plus_losses(total, count)
            return LossSums(
                total, count, outputs.sums(count) | sums, carried if outputs.state is None else outputs.state
            )

        return loss


class Preference(OfAnswers):
    """A loss of pairs of answers."""

    @abstractmethod
    def of_pairs(
        self, answers: PairedAnswers, reference: PairedAnswers | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of each pair and its metrics, float[rows] each."""

    def read(self, logits: jax.Array, batch: Batch, vocab_size: int) -> PairedAnswers:
        targets, segments = batch["targets"], batch["segments"]
        is_target = targets >= 0
        nll = token_loss.cross_entropy(logits, jnp.where(is_target, targets, 0), vocab_size)
        of = jnp.stack([is_target & (segments == one) for one in (CHOSEN, REJECTED)], axis=1)
        log_probs = -jnp.where(of, nll[:, None], jnp.zeros_like(nll)[:, None]).sum(-1)
        return PairedAnswers(log_probs, of.sum(-1).astype(nll.dtype))

    def summed(self, new: Any, base: Any, batch: Batch) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        each, metrics = self.of_pairs(new, base)
        total, sums = jax.tree.map(lambda x: jnp.where(new.are_pairs, x, jnp.zeros_like(x)).sum(), (each, metrics))
        return total, new.are_pairs.sum(dtype=jnp.int32), sums


class DPO(Preference):
    """Direct preference optimization: `-log sigmoid(beta * (difference of the chosen answer - of the rejected one))`.

    An answer's difference is its log-probability minus that of the reference model. `beta` times it is its reward. The
    reference is the model at the start of the run: with LoRA the model without it, else a second copy.

    Source: Rafailov et al. 2023, arXiv:2305.18290.
    """

    has_reference: ClassVar = True  # pyright: ignore
    kind: Literal["dpo"] = "dpo"
    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    """Larger values keep the model nearer to the reference."""

    def of_pairs(self, answers, reference):
        assert reference is not None, "has_reference"
        rewards = self.beta * (answers.log_probs - reference.log_probs)
        margin = rewards[:, 0] - rewards[:, 1]
        return jax.nn.softplus(-margin), _metrics(rewards, margin)


class ORPO(Preference):
    """Odds ratio preference optimization: `-log P(chosen) - weight * log sigmoid(log(odds(chosen) / odds(rejected)))`.

    `log P` is the mean log-probability of an answer's tokens, and `odds = P / (1 - P)`. No reference model is needed.
    `weight * log P` is an answer's reward.

    Source: Hong et al. 2024, arXiv:2403.07691.
    """

    has_reference: ClassVar = False  # pyright: ignore
    kind: Literal["orpo"] = "orpo"
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    """Weight of the odds ratio, lambda in the paper."""

    def of_pairs(self, answers, reference):
        means = answers.means
        odds = means - _log_of_rest(means)
        ratio = odds[:, 0] - odds[:, 1]
        each = self.weight * jax.nn.softplus(-ratio) - means[:, 0]
        rewards = self.weight * means
        own = {"cross_entropy": -means[:, 0], "log_odds_ratio": ratio}
        return each, _metrics(rewards, rewards[:, 0] - rewards[:, 1], means) | own


def _metrics(rewards: jax.Array, margin: jax.Array, scores: jax.Array | None = None) -> dict[str, jax.Array]:
    """How often the chosen answer has the higher score, by default the reward; and the rewards. Equal scores count 1/2,
    as those of a model that is its reference do."""
    scores = rewards if scores is None else scores
    accuracy = (1 + jnp.sign(scores[:, 0] - scores[:, 1])) / 2
    of_each = {"reward_chosen": rewards[:, 0], "reward_rejected": rewards[:, 1]}
    return {"reward_accuracy": accuracy, "reward_margin": margin} | of_each


def _log_of_rest(log_p: jax.Array) -> jax.Array:
    """`log(1 - p)` of `log p`, exact near both ends. A probability that rounds to 1 counts as the one before it."""
    below = jnp.minimum(log_p, -jnp.asarray(jnp.finfo(log_p.dtype).eps, log_p.dtype))
    is_likely = below > -0.6931471805599453  # more than one half
    low = jnp.where(is_likely, -jnp.ones_like(below), below)
    return jnp.where(is_likely, jnp.log(-jnp.expm1(below)), jnp.log1p(-jnp.exp(low)))


class Copy(Strategy):
    """Carries the first parameters, which are the reference. They are stored as the parameters are, also under ZeRO-1.

    Memory: the parameters once more.
    """

    key = REFERENCE
    is_of_loss = True

    def placed(self, placement: StatePlacement) -> Any:
        return placement.params

    def initial(self, params: Any, placed: Any) -> Any:
        return params


def carried_reference(dims: Any) -> Reference:
    """The parameters in the carried state, which are stored as those of the model are.

    Args:
      dims: the names of the dims of each parameter.
    """
    return lambda params, carried: data.gather_params(carried[REFERENCE], dims)
