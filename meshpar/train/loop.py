"""The loop: read from top to bottom."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from meshpar.train.checkpoint import Checkpoints
from meshpar.train.data import Dataset
from meshpar.train.evaluate import Evaluation
from meshpar.train.metrics import Recorder
from meshpar.train.state import TrainState
from meshpar.train.step import Step

# jax 0.10 on simulated devices stops for ever with more than about 32 steps in flight.
IN_FLIGHT = 8


@dataclass(frozen=True)
class Loop:
    """How often what is done, and with what.

    Args:
      config: what a checkpoint keeps of the run.
      eval_every, checkpoint_every: in steps; None for only at the end.
      flops_per_s: from tokens/s to MFU; None where the chip is not known.
      profile: a folder for a trace of a few steps.
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
    checkpoint_every: int | None = None
    mfu_of: Callable[[float], float] | None = None
    profile: Path | None = None

    def fit(self, state: TrainState) -> TrainState:
        """Trains until `num_steps`, from the state's own step on; then evaluates and writes a checkpoint.

        Implicit transfers between host and devices raise: each is written down.
        """
        start = int(jax.device_get(state.step))
        self.recorder.begin(start, self.config)
        if start >= self.num_steps:
            return state
        with jax.transfer_guard("disallow"), closing(self.train.batches(start)) as batches:
            state = self._steps(state, start, batches)
            self._evaluate(state, self.num_steps)
            self._save(state, self.num_steps)
        self.recorder.summarize(self.num_steps)
        return state

    def _steps(self, state: TrainState, start: int, batches: Iterator[Any]) -> TrainState:
        in_flight: deque[Any] = deque()
        clock = Clock()
        for index in range(start + 1, self.num_steps + 1):
            with self._profiled(index - start):
                state, metrics = self.step(state, self._put(next(batches)))
            in_flight.append(metrics)
            if len(in_flight) > IN_FLIGHT:
                jax.block_until_ready(in_flight.popleft())
            if index == start + 1 or index % self.log_every == 0 or index == self.num_steps:
                self._log(index, metrics, clock)
            if _due(index, self.eval_every, self.num_steps):
                with clock.stopped():
                    self._evaluate(state, index)
            if _due(index, self.checkpoint_every, self.num_steps):
                with clock.stopped():
                    self._save(state, index)
        return state

    def _log(self, index: int, metrics: Any, clock: Clock) -> None:
        values = {name: value.item() for name, value in jax.device_get(metrics).items()}
        step_s = clock.lap(index)
        if step_s is not None:
            values |= {"step_s": step_s, "tokens_per_s": values["tokens"] / step_s}
            if self.mfu_of:
                values["mfu"] = self.mfu_of(values["tokens_per_s"])
        self.recorder.record("train", index, **values)

    def _evaluate(self, state: TrainState, index: int) -> None:
        sums = [jax.device_get(self.evaluate(state.params, self._put(batch))) for batch in self.held_out]
        tokens = sum(int(s["tokens"]) for s in sums)
        loss = sum(float(s["loss_sum"]) for s in sums) / max(tokens, 1)
        self.recorder.record("evaluation", index, loss=loss, tokens=tokens)

    def _save(self, state: TrainState, index: int) -> None:
        self.checkpoints.save(index, state, self.config)

    def _put(self, batch: Any) -> Any:
        return {name: jax.device_put(x, self.step.batch[name].sharding) for name, x in batch.items()}

    @contextmanager
    def _profiled(self, done: int) -> Iterator[None]:
        """Traces steps 4 to 6: the first ones warm up."""
        if self.profile and done == 4:
            jax.profiler.start_trace(str(self.profile))
        yield
        if self.profile and (done == 6 or done == self.num_steps > 4):
            jax.profiler.stop_trace()


class Clock:
    """Seconds a step, since the last lap, less what was not a step."""

    def __init__(self) -> None:
        self.since: tuple[int, float] | None = None

    def lap(self, index: int) -> float | None:
        """Mean seconds of the steps since the last lap; None on the first, which knows no beginning."""
        now = time.perf_counter()
        before, self.since = self.since, (index, now)
        return (now - before[1]) / (index - before[0]) if before else None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.since:
            self.since = (self.since[0], self.since[1] + time.perf_counter() - start)


def _due(index: int, every: int | None, last: int) -> bool:
    return every is not None and index % every == 0 and index != last
