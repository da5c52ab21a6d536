"""The loop: read from top to bottom."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshpar.checkpoint.checkpoints import Checkpoints
from meshpar.train.data import Dataset
from meshpar.train.ema import averaged
from meshpar.train.evaluate import Callback, Evaluation, called
from meshpar.train.feed import local_rows, put
from meshpar.train.loggers import Record
from meshpar.train.metrics import Recorder, evaluations
from meshpar.train.state import TrainState
from meshpar.train.step import Metrics, Step
from meshpar.train.stopping import EarlyStopping

# jax 0.10 on simulated devices stops for ever with more than about 32 steps in flight.
IN_FLIGHT = 8


@dataclass(frozen=True)
class Loop:
    """How often what is done, and with what.

    Args:
      config: what the records keep of the run.
      log_every, eval_every: in steps, as is `checkpoints.kept.every`; None for only at the end. The first step is
        logged too.
      mfu_of: from tokens/s to model FLOPs utilization; None where the chip is not known.
      profile: a folder for a trace of three steps, once the first three have warmed up.
      early_stopping: when to end before `num_steps`.
      callbacks: what else an evaluation records.
      evaluated: the records of evaluations, those of earlier processes included.
    """

    step: Step
    evaluate: Evaluation
    train: Dataset
    held_out: Dataset
    recorder: Recorder
    checkpoints: Checkpoints
    config: dict[str, Any]
    num_steps: int
    log_every: int
    eval_every: int | None = None
    mfu_of: Callable[[float], float] | None = None
    profile: Path | None = None
    early_stopping: EarlyStopping | None = None
    callbacks: Sequence[Callback] = ()
    evaluated: list[Record] = field(default_factory=list)

    def fit(self, state: TrainState) -> TrainState:
        """Trains until `num_steps`, from the state's own step on; then evaluates, saves, and sums up the whole run.

        Implicit transfers between host and devices raise: each is written down. What is interrupted writes nothing
        more: it goes on from the last checkpoint, as when it is killed.
        """
        end = start = int(jax.device_get(state.step))
        self.evaluated[:] = evaluations(self.recorder.file, start)
        self.recorder.begin(start, self.config)
        if start < self.num_steps and not self._stops(start):
            with jax.transfer_guard("disallow"), closing(self.train.batches(start, self._rows)) as batches:
                state, end, told = self._steps(state, start, batches)
                self._save(state, end, told or self._evaluate(state, end))
        self.recorder.summarize(end)
        return state

    def _steps(self, state: TrainState, start: int, batches: Iterator[Any]) -> tuple[TrainState, int, dict[str, float]]:
        """The state, the step at which it ended, and what was evaluated there, if it ended early."""
        in_flight: deque[Metrics] = deque()
        stopwatch = Stopwatch()
        with ExitStack() as trace:
            for index in range(start + 1, self.num_steps + 1):
                if self.profile and index == self._nth(start, 4):
                    with stopwatch.paused():
                        trace.enter_context(jax.profiler.trace(str(self.profile)))
                with stopwatch.waiting():
                    batch = self._put(next(batches))
                state, metrics = self.step(state, batch)
                stopwatch.count(metrics["tokens"])
                in_flight.append(metrics)
                if len(in_flight) > IN_FLIGHT:
                    jax.block_until_ready(in_flight.popleft())
                if self.profile and index == self._nth(start, 6):
                    with stopwatch.paused():
                        trace.close()
                if index == start + 1 or index == self.num_steps or index % self.log_every == 0:
                    self._log(index, metrics, stopwatch)
                evaluated: dict[str, float] = {}
                if self._due(index, self.eval_every):
                    with stopwatch.paused():
                        evaluated = self._evaluate(state, index)
                    if self._stops(index):
                        return state, index, evaluated
                if self._due(index, self.checkpoints.kept.every):
                    with stopwatch.paused():
                        self._save(state, index, evaluated)
        return state, self.num_steps, {}

    def _nth(self, start: int, n: int) -> int:
        """The n-th step since the start, or the last, if there are fewer."""
        return min(start + n, self.num_steps)

    def _due(self, index: int, every: int | None) -> bool:
        """The last step has its own evaluation and checkpoint."""
        return every is not None and index % every == 0 and index != self.num_steps

    def _log(self, index: int, metrics: Metrics, stopwatch: Stopwatch) -> None:
        values = {name: value.item() for name, value in jax.device_get(metrics).items()}
        speed = stopwatch.lap()
        if speed and self.mfu_of:
            speed["mfu"] = self.mfu_of(speed["tokens_per_s"])
        self.recorder.record("train", index, **values, **speed)

    def _evaluate(self, state: TrainState, index: int) -> dict[str, float]:
        params, held_out = averaged(state), self.held_out.batches(rows=self._rows)
        told = [jax.device_get(self.evaluate(params, self._put(batch), state.carried)) for batch in held_out]
        sums = {name: sum(one[name].item() for one in told) for name in told[0]}
        tokens = sums.pop("tokens")
        means = {name: total / tokens for name, total in sums.items()}
        means |= called(self.callbacks, state, index, {*means, "tokens"})
        self.recorder.record("evaluation", index, **means, tokens=tokens)
        self.evaluated.append({"step": index, **means, "tokens": tokens})
        return means

    def _stops(self, index: int) -> bool:
        """Whether to end here; says why."""
        verdict = self.early_stopping.verdict(self.evaluated) if self.early_stopping else None
        if verdict:
            self.recorder.record("stop", index, **verdict)
        return verdict is not None

    def _save(self, state: TrainState, index: int, evaluated: dict[str, float]) -> None:
        self.checkpoints.save(index, state, evaluated)

    def _put(self, batch: Any) -> dict[str, jax.Array]:
        return put(batch, self.step.batch, self._rows)

    @cached_property
    def _rows(self) -> np.ndarray:
        return local_rows(self.step.batch)


@dataclass
class Stopwatch:
    """The speed of steps, and of nothing but steps: no compilation, evaluation, checkpoint or trace.

    Devices run behind the host, so every reading waits for the steps that were counted.

    Args:
      since: when the lap began, in seconds; None before the first.
      tokens: int32[] of each step of the lap.
      waited_s: how long the lap's steps waited for their batches. Devices that run behind the host wait less.
    """

    since: float | None = None
    tokens: list[jax.Array] = field(default_factory=list)
    waited_s: float = 0.0

    def count(self, tokens: jax.Array) -> None:
        self.tokens.append(tokens)

    def lap(self) -> dict[str, float]:
        """`step_s` (the mean), `tokens_per_s` and `data_wait` (a fraction of the time) of this lap.

        Nothing of the first lap, whose beginning is not known.
        """
        tokens, num_steps = sum(t.item() for t in jax.device_get(self.tokens)), len(self.tokens)
        since, self.since, self.tokens = self.since, time.perf_counter(), []
        waited_s, self.waited_s = self.waited_s, 0.0
        if since is None or not num_steps:
            return {}
        elapsed_s = self.since - since
        return {
            "step_s": elapsed_s / num_steps,
            "tokens_per_s": tokens / elapsed_s,
            "data_wait": waited_s / elapsed_s,
        }

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within, a batch is awaited."""
        began = time.perf_counter()
        yield
        self.waited_s += time.perf_counter() - began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens within is not counted."""
        jax.block_until_ready(self.tokens)
        began = time.perf_counter()
        yield
        if self.since is not None:
            self.since += time.perf_counter() - began
