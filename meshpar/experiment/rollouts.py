"""Connects a training that samples answers to the engine of a server."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from meshpar.data import Prompts
from meshpar.data.chat.prompts import PromptRows
from meshpar.data.dataset import Dataset
from meshpar.errors import ConfigError
from meshpar.experiment.prepare import Prepared
from meshpar.interop import user_code
from meshpar.models.decoder import DecoderModel
from meshpar.train.grpo import GRPO

if TYPE_CHECKING:
    from meshpar.serve.rollouts import Rollouts


def rollouts_of(prepared: Prepared, train: Any) -> Rollouts | None:
    """What answers the prompts of a run; None if it reads its rows.

    Raises:
      ConfigError: the reward cannot be imported, or the run has several processes.
    """
    from meshpar.serve.rollouts import FILE, Rollouts  # its engine knows no runs; other runs need not load it

    run = prepared.run
    if not isinstance(run.loss, GRPO):
        return None
    assert isinstance(run.data, Prompts) and isinstance(train.parts[0], PromptRows), "validated"
    if jax.process_count() > 1:
        raise ConfigError("loss.kind = grpo: answers are sampled in one process; run it in one")
    reward = user_code.load(run.loss.reward)
    if not callable(reward):
        raise ConfigError(f"loss.reward: {run.loss.reward} is {type(reward).__name__}, and not a function")

    def rewards(answers: list[str], lines: list[Any]) -> Any:
        with user_code.blamed(run.loss.reward):  # pyright: ignore
            return reward(answers, lines)

    model = run.model
    assert isinstance(model, DecoderModel), "validated"
    run.run_dir.mkdir(parents=True, exist_ok=True)
    return Rollouts(
        model=model, ctx=prepared.ctx, dtype=np.dtype(run.precision.params), cache_format=run.precision.cache,
        loss=run.loss, lora=run.lora, reward=rewards, lines=train.parts[0].lines, decode=run.data.tokenizer.decode,
        ends=frozenset(run.data.encoder().ends), seed=run.seed, batch_size=run.data.batch_size,
        seq_len=run.data.seq_len, file=run.run_dir / FILE,
    )  # fmt: skip


def of_prompts(dataset: Any, loss: Any) -> Any:
    """The batches of prompts of a run that answers each of them several times; other data sets are unchanged."""
    if not isinstance(loss, GRPO):
        return dataset
    assert isinstance(dataset, Dataset), "prompts are packed rows"
    order = replace(dataset.order, first=dataset.order.first // loss.group)
    return replace(dataset, batch_size=dataset.batch_size // loss.group, order=order)
