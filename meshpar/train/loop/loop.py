"""The loop: read from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshpar.checkpoint.checkpoints import Checkpoints
from meshpar.errors import MeshparError, RunError
from meshpar.optim.ema import averaged
from meshpar.train.data import Dataset
from meshpar.train.evaluate import Callback, Evaluation, called
from meshpar.train.loop.feed import local_rows, put
from meshpar.train.loop.signals import Interrupted, Signals
from meshpar.train.loop.stall import Stall
from meshpar.train.loop.stopping import EarlyStopping
from meshpar.train.loop.window import Window
from meshpar.train.records.loggers import Record
from meshpar.train.records.metrics import Recorder, evaluations
from meshpar.train.records.writing import writing
from meshpar.train.state import TrainState
from meshpar.train.step import Metrics, Step


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
      max_skipped_steps: so many steps in a row that are not finite end the run; None for any number.
      source: what the batches are read from, as people know it.
      signals: what may end the run before.
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
    max_skipped_steps: int | None = None
    source: str = "the data set"
    signals: Signals = field(default_factory=Signals)
    evaluated: list[Record] = field(default_factory=list)

    def fit(self, state: TrainState) -> TrainState:
        """Trains until `num_steps`, from the state's own step on; then evaluates, saves, and sums up the whole run.

        Implicit transfers between host and devices raise: each is written down.

        Raises:
          Interrupted: a signal came; the step that ran was finished and saved. Any other `KeyboardInterrupt` may come
            in the middle of a step: nothing more is written then, and the run goes on from its last checkpoint, as
            when it is killed.
          RunError: a file could not be written, the data broke off, or too many steps were skipped.
        """
        end = start = int(jax.device_get(state.step))
        self.evaluated[:] = evaluations(self.recorder.file, start)
        self.recorder.begin(start, self.config)
        with jax.transfer_guard("disallow"), self._saved():
            self._make_up_for_an_evaluation(state, start)
            if start < self.num_steps and not self._stops(start):
                with closing(self.train.batches(start, self._rows)) as batches:
                    state, end = self._steps(state, start, batches)
        self.recorder.summarize(end)
        return state

    def _steps(self, state: TrainState, start: int, batches: Iterator[Any]) -> tuple[TrainState, int]:
        """The state, and the step at which it ended."""
        window = Window(start, int(jax.device_get(state.skipped)), self.max_skipped_steps)
        stopwatch = Stopwatch()
        stall = Stall(self.source)
        saved_at = time.monotonic()
        is_due = False
        self.signals.begin()
        with ExitStack() as stack:
            stack.enter_context(stall.watched())
            trace = stack.enter_context(ExitStack())
            for index in range(start + 1, self.num_steps + 1):
                is_last = index == self.num_steps
                if self.profile and index == self._nth(start, 4):
                    with stopwatch.paused():
                        trace.enter_context(jax.profiler.trace(str(self.profile)))
                try:
                    with stopwatch.waiting(), stall.waiting(index), self._interruptible():
                        batch = self._next(batches, index)
                except Interrupted:
                    raise self._interrupted_before(state, index) from None
                state, metrics = self.step(state, self._put(batch))
                stopwatch.count(metrics["tokens"])
                window.add(metrics)
                if self.profile and index == self._nth(start, 6):
                    with stopwatch.paused():
                        trace.close()
                is_logged = index == start + 1 or is_last or index % self.log_every == 0
                if is_logged:
                    self._log(index, metrics, stopwatch)
                evaluated: dict[str, float] = {}
                if is_last or self._due(index, self.eval_every):
                    window.drain()
                    with stopwatch.paused():
                        evaluated = self._evaluate(state, index)
                ends = is_last or (bool(evaluated) and self._stops(index))
                is_interrupted, is_overdue = self._agreed(saved_at, is_logged)
                is_due = is_due or is_overdue or self._due(index, self.checkpoints.kept.every)
                # While steps are skipped, no parameter changes: a checkpoint waits for a step that is finite.
                if ends or is_interrupted or (is_due and not window.drain()):
                    with stopwatch.paused():
                        self._save(state, index, evaluated, keeps_all=window.drain() > 0)
                    is_due = False
                    saved_at = time.monotonic()
                if is_interrupted:
                    raise self._interrupted(index)
                if ends:
                    return state, index
        raise AssertionError("the last step returns")

    def _next(self, batches: Iterator[Any], index: int) -> Any:
        """The batch of a step.

        Raises:
          RunError: the data set raised, or has no more.
        """
        try:
            return next(batches)
        except MeshparError as error:
            raise RunError(f"step {index}: {error}") from None
        except StopIteration:
            raise RunError(f"step {index}: {self.source} has no more batches") from None
        except Exception as error:
            told = f"{type(error).__name__}: {error}".partition("\n")[0]
            fix = "the same command goes on from the last checkpoint"
            raise RunError(f"step {index}: {self.source} raised {told}; {fix}") from error

    def _interruptible(self) -> AbstractContextManager[None]:
        """Several processes end after the same step, see `_agreed`: none of them while it waits."""
        return self.signals.interruptible() if jax.process_count() == 1 else nullcontext()

    def _interrupted_before(self, state: TrainState, index: int) -> Interrupted:
        """What to raise when a signal came while the batch of this step was awaited; in one process only."""
        self._wait()
        if self.checkpoints.latest() != index - 1:
            if index == 1:
                return Interrupted(self.signals.nothing_to_save())
            self._save(state, index - 1, {})
        return self._interrupted(index - 1)

    def _interrupted(self, index: int) -> Interrupted:
        """What to raise, once the state of this step is on disk."""
        self._wait()
        where = self.recorder.file.parent / self.checkpoints.directory.name / str(index)
        then = "the same command goes on from it"
        return Interrupted(f"stopped by {self.signals.name} at step {index}; checkpoint in {where}; {then}")

    def _agreed(self, saved_at: float, is_logged: bool) -> tuple[bool, bool]:
        """Whether to end, and whether it is time for a checkpoint. Several processes agree at steps that are logged."""
        every = self.checkpoints.kept.every_minutes
        is_overdue = every is not None and time.monotonic() - saved_at >= 60 * every
        is_interrupted = self.signals.caught is not None
        if jax.process_count() == 1:
            return is_interrupted, is_overdue
        if not is_logged:
            return False, False
        with jax.transfer_guard("allow"):
            told = multihost_utils.process_allgather(np.array([is_interrupted, is_overdue]))
        return bool(told[:, 0].any()), bool(told[0, 1])

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
        """The means over held-out data, which are recorded; nothing if a signal comes on the way."""
        params = averaged(state)
        told = []
        with closing(self.held_out.batches(rows=self._rows)) as held_out:
            for batch in held_out:
                if self.signals.caught and jax.process_count() == 1:
                    return {}
                told.append(jax.device_get(self.evaluate(params, self._put(batch), state.carried)))
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

    def _make_up_for_an_evaluation(self, state: TrainState, start: int) -> None:
        """A signal may have ended the run before the evaluation of its last step."""
        is_due = start == self.num_steps or self._due(start, self.eval_every)
        if start and is_due and start not in (record["step"] for record in self.evaluated):
            self._evaluate(state, start)

    def _save(self, state: TrainState, index: int, evaluated: dict[str, float], keeps_all: bool = False) -> None:
        """Begins to save. With `keeps_all`, for the last save of a run, no checkpoint is removed for it."""
        self.recorder.check()
        if keeps_all:
            self._wait()
            self.checkpoints.kept = self.checkpoints.kept.without_end()
        with writing("a checkpoint", self.checkpoints.directory):
            self.checkpoints.save(index, state, evaluated)

    def _wait(self) -> None:
        with writing("a checkpoint", self.checkpoints.directory):
            self.checkpoints.wait()

    @contextmanager
    def _saved(self) -> Iterator[None]:
        """At its end all checkpoints are on disk. Of two errors the first is raised."""
        try:
            yield
            self._wait()
        except BaseException:
            with suppress(Exception):
                self.checkpoints.wait()
            raise

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
