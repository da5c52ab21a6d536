"""Answers of a model to prompts while it trains, by the engine of a server on the parameters of the training."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshpar.data.chat.prompts import LINES
from meshpar.errors import DataError, RunError, excerpt
from meshpar.nn.compressed import dequantized
from meshpar.nn.lora import LoRA
from meshpar.serve.engine import Engine
from meshpar.serve.on_mesh import for_tokens
from meshpar.serve.paged_decoding import PagedDecoding
from meshpar.serve.sampling import Sampling
from meshpar.serve.scheduler import Capacity, Request, Scheduler
from meshpar.train.grpo import ADVANTAGES, GRPO, LOG_PROBS, REWARDS, advantages_of
from meshpar.train.program import shardings, structs
from meshpar.tree import flatten_with_paths, map_with_path

FILE = "rollouts.jsonl"
PAGE_SIZE, CHUNK = 16, 64
HELD_OUT = 2**32 - 1
"""In place of a step, in the seed of the answers of an evaluation."""


Row = dict[str, Any]
"""A line of the record: `step`, `line` of the data, `prompt`, `answer` and its `reward`, its `tokens` with the one that
ended it, and `log_probs`, with which each was sampled."""


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Makes the rows of a step: the model's answers to its prompts, with their rewards.

    Args:
      model: the decoder, as the training stores it.
      ctx, dtype, cache_format: see `PagedDecoding`.
      reward: the user's function, see `GRPO.reward`.
      lines: the objects of all lines of the data.
      decode: token ids -> text.
      ends: ids that end an answer.
      file: records each answer. A run that resumes between the steps of the same answers reads them there.

    Memory: the pages of the rows. The parameters are those of the training, without a copy where both are sharded
      alike; with LoRA, a second copy of the model has its updates in the kernels.
    """

    model: Any
    ctx: Any
    dtype: np.dtype
    cache_format: Any
    loss: GRPO
    lora: LoRA | None
    reward: Callable[[list[str], list[Mapping[str, Any]]], Sequence[float]]
    lines: Sequence[Mapping[str, Any]]
    decode: Callable[[Sequence[int]], str]
    ends: Collection[int]
    seed: int
    batch_size: int
    seq_len: int
    file: Path
    _last: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)

    def batch(self, params: Any, index: int | None, read: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The rows of a step.

        Args:
          params: the parameters before the step, as the training stores them.
          index: of the step, from 1; None for an evaluation.
          read: a batch of prompts, one for each group.

        Raises:
          DataError: the function of the reward returns something else than a number for each answer.
        """
        with jax.transfer_guard("allow"):
            if index is None:
                return self._sampled(params, HELD_OUT, read)
            first = index - (index - 1) % self.loss.updates
            if first not in self._last:
                self._last.clear()
                self._last[first] = self._sampled(params, first, read) if first == index else self._recorded(first)
            return self._last[first]

    def _sampled(self, params: Any, step: int, read: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        sizes = (read["segments"] > 0).sum(-1)
        asked = zip(read[LINES][:, 0].tolist(), read["tokens"], sizes, strict=True)
        rows: list[Row] = [
            {"step": step, "line": line, "prompt": ids[:size].tolist(), "tokens": [], "log_probs": []}
            for line, ids, size in asked
            for _ in range(self.loss.group if size else 0)
        ]
        self._answer(params, rows, step)
        texts = [self.decode([one for one in row["tokens"] if one not in self.ends]) for row in rows]
        rewards = self._rewards(texts, [self.lines[row["line"]] for row in rows])
        rows = [row | {"answer": text, "reward": float(x)} for row, text, x in zip(rows, texts, rewards, strict=True)]
        if step != HELD_OUT:
            with self.file.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        return self._arrays(rows)

    def _answer(self, params: Any, rows: Sequence[Row], step: int) -> None:
        """Adds the tokens of an answer to each prompt."""
        self._engine.load(self._of_engine(params))
        seed = int(np.random.SeedSequence([self.seed, step]).generate_state(1)[0])
        how = Sampling(temperature=1.0, seed=seed)
        room = [min(self.loss.max_tokens, self.seq_len + 1 - len(row["prompt"])) for row in rows]
        requests = {
            Request(prompt=row["prompt"], max_tokens=most, sampling=how, index=i, scores=True): row
            for i, (row, most) in enumerate(zip(rows, room, strict=True))
        }
        scheduler = Scheduler(self._engine.decoding.capacity)  # a new one: pages of other parameters must not be used
        scheduler.submit(list(requests))
        for request, token, score in scheduler.answered(self._engine.run):
            row = requests[request]
            row["tokens"].append(token)
            row["log_probs"].append(score.logprob)
            if token in self.ends or len(row["tokens"]) == request.max_tokens:
                scheduler.end(request)

    def _rewards(self, texts: list[str], lines: list[Mapping[str, Any]]) -> np.ndarray:
        name = f"loss.reward: {self.loss.reward}"
        found: Any = self.reward(texts, lines)  # raises a ConfigError that names the line of the user's code
        try:
            rewards = np.asarray(found, np.float64)
        except (TypeError, ValueError):
            raise DataError(f"{name} returned {excerpt(repr(found))}, and not a number for each answer") from None
        if rewards.shape != (len(texts),):
            what = f"returned {list(rewards.shape)} values for {len(texts)} answers"
            raise DataError(f"{name} {what}; a sequence with a number for each answer")
        if wrong := np.flatnonzero(~np.isfinite(rewards)).tolist():
            what = f"returned {rewards[wrong[0]]} for {len(wrong)} of {len(texts)} answers"
            raise DataError(
                f"{name} {what}, first for {excerpt(repr(texts[wrong[0]]))}; a finite number for each answer"
            )
        return rewards

    def _arrays(self, rows: Sequence[Row]) -> dict[str, np.ndarray]:
        shape = (self.batch_size, self.seq_len)
        arrays: dict[str, np.ndarray] = {
            name: np.zeros(shape, np.int32) for name in ("tokens", "segments", "positions")
        }
        arrays |= {"targets": np.full(shape, -1, np.int32), LOG_PROBS: np.zeros(shape, np.float32)}
        arrays |= {name: np.zeros(self.batch_size, np.float32) for name in (ADVANTAGES, REWARDS)}
        for i, row in enumerate(rows):
            ids = [*row["prompt"], *row["tokens"]]
            here, learned = slice(0, len(ids) - 1), slice(len(row["prompt"]) - 1, len(ids) - 1)
            arrays["tokens"][i, here], arrays["segments"][i, here] = ids[:-1], 1
            arrays["positions"][i, here] = np.arange(len(ids) - 1)
            arrays["targets"][i, learned], arrays[LOG_PROBS][i, learned] = row["tokens"], row["log_probs"]
        rewards = np.array([row["reward"] for row in rows])
        arrays[REWARDS][: len(rewards)] = rewards
        arrays[ADVANTAGES][: len(rewards)] = advantages_of(rewards, self.loss.group)
        return arrays

    def _recorded(self, step: int) -> dict[str, np.ndarray]:
        """The rows that an earlier process sampled at a step. Raises RunError if they are not there."""
        try:
            with self.file.open(encoding="utf-8") as file:
                rows = [row for row in map(json.loads, file) if row["step"] == step][-self.batch_size :]
            found = self._arrays(rows)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{self.file}: the answers of step {step} cannot be read: {error}") from None
        if len(rows) != self.batch_size:
            what = f"has {len(rows)} of the {self.batch_size} answers of step {step}"
            raise RunError(f"{self.file} {what}, on which the next step trains too; begin in another run_dir")
        return found

    # The engine ----------------------------------------------------------------------------------------------------

    @cached_property
    def _decoding(self) -> PagedDecoding:
        ctx = for_tokens(self.ctx)
        capacity = Capacity.of_rows(
            ctx.shards("batch"), self.batch_size, self.seq_len + 1, PAGE_SIZE, chunk=CHUNK, max_queue=self.batch_size
        )  # fmt: skip
        model = self.model.model_copy(update={"weights": None}) if self.lora else self.model
        return PagedDecoding(
            model=model, ctx=ctx, dtype=self.dtype, cache_format=self.cache_format, capacity=capacity
        )  # fmt: skip

    @cached_property
    def _engine(self) -> Engine:
        return Engine(self._decoding, lambda structs: None)

    def _of_engine(self, params: Any) -> Any:
        """The parameters as the engine needs them."""
        placed = structs(self._decoding.params)
        if self.lora:
            merged = self._merge(flatten_with_paths(params))
            return map_with_path(lambda path, _: merged[path], placed)
        return jax.tree.map(lambda x, s: jax.device_put(x.astype(s.dtype), s.sharding), params, placed)

    @cached_property
    def _merge(self) -> Callable[..., Any]:
        lora = self.lora
        assert lora, "otherwise nothing is merged"
        placed = flatten_with_paths(structs(self._decoding.params))

        def merge(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
            plain = dequantized(self.model.abstract(), params) if self.model.weights else params
            return lora.merged(plain)

        return jax.jit(merge, out_shardings=shardings(placed))
