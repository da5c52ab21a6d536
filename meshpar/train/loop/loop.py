"""The training loop: trains, evaluates, records and saves until the run ends."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from meshpar.checkpoint.agree import everyones
from meshpar.checkpoint.checkpoints import Checkpoints
from meshpar.errors import DataError, MeshparError, RunError
from meshpar.mesh.cursor import Cursor
from meshpar.optim.ema import averaged
from meshpar.records.file import evaluations
from meshpar.records.loggers import Record
from meshpar.records.metrics import Recorder
from meshpar.train.copies.copies import Copies
from meshpar.train.evaluate import Evaluation, called
from meshpar.train.loop.events import Events, StepMetrics, events_of
from meshpar.train.loop.feed import local_rows, put
from meshpar.train.loop.profile import profiled
from meshpar.train.loop.saving import Saving
from meshpar.train.loop.signals import Interrupted, Signals
from meshpar.train.loop.stall import Stall
from meshpar.train.loop.stopping import EarlyStopping
from meshpar.train.loop.stopwatch import Stopwatch
from meshpar.train.loop.window import Window
from meshpar.train.program import counts
from meshpar.train.replicas import differences
from meshpar.train.state import TrainState
from meshpar.train.step import Metrics, Step
from meshpar.train.tasks.metrics import Gathered, Measure


class Reads(Protocol):
    """Batches by index, such as a `Dataset`."""

    def batches(self, start: int = 0, rows: Any = None) -> Generator[Any, None, None]:
        """The batches from `start` on; of each only these rows."""
        ...


Shown = Generator[tuple[TrainState, StepMetrics], None, TrainState]
"""The state and the metrics of each step; returns the last state."""


def result(steps: Generator[Any, None, TrainState]) -> TrainState:
    """Runs a training to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            return ended.value


@dataclass(frozen=True)
class Steps:
    """Trains a step for each turn of a `for` loop. Only the loop holds its iterator, so leaving the loop ends the run.

    Each loop goes on from the last checkpoint.
    """

    begin: Callable[[], Shown]

    def __iter__(self) -> Shown:
        return self.begin()


class Rollouts(Protocol):
    """Answers prompts with the parameters before a step."""

    def batch(self, params: Any, index: int | None, read: Mapping[str, Any]) -> dict[str, Any]:
        """The rows of a step: (parameters, its index or None for an evaluation, prompts) -> the arrays of a batch."""
        ...


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Trains, evaluates, logs and saves at given intervals.

    Args:
      held_out: the rows that `evaluate` evaluates; None to record the callbacks' metrics alone.
      config: the run's config, which is recorded.
      log_every, eval_every: in steps, as is `checkpoints.retention.every`; None for only at the end. The first step is
        logged too.
      mfu_of: tokens/s -> model FLOPs utilization; None if the chip is not known.
      profile: folder for a trace of three steps, after three steps of warm-up.
      early_stopping: when to end before `num_steps`.
      callbacks: functions whose results are recorded with each evaluation, and objects with methods of `EVENTS`.
      max_skipped_steps: the run fails after this many skipped steps in a row; None for no limit.
      check_replicas_every: steps between comparisons of the copies of replicated state; None to compare none.
      source: name of the data, for messages.
      signals: signals that end the run.
      cursor: where this process writes its step and phase.
      evaluated: the records of evaluations, including those of earlier processes.
      copies: copies of the state in the memory of the hosts; None without them.
      measure: metrics of evaluations that are no means over batches; None without them.
      rows: of a batch that is made of rows of arrays, whose speed is recorded; None for that of tokens.
      rollouts: makes the rows of each step from what the data set reads; None if these are the rows.
      after_first: called once, after the record of the first step: checks for which that step need not wait.
    """

    step: Step
    train: Reads
    held_out: Reads | None
    recorder: Recorder
    checkpoints: Checkpoints
    config: dict[str, Any]
    num_steps: int
    log_every: int
    evaluate: Evaluation | None = None
    eval_every: int | None = None
    mfu_of: Callable[[float], float] | None = None
    profile: Path | None = None
    early_stopping: EarlyStopping | None = None
    callbacks: Sequence[Any] = ()
    max_skipped_steps: int | None = None
    check_replicas_every: int | None = None
    source: str = "the data set"
    signals: Signals = field(default_factory=Signals)
    cursor: Cursor = field(default_factory=Cursor)
    evaluated: list[Record] = field(default_factory=list)
    copies: Copies | None = None
    measure: Measure | None = None
    after_first: Callable[[], None] = lambda: None
    rows: int | None = None
    rollouts: Rollouts | None = None

    def fit(self, state: TrainState) -> TrainState:
        """Trains from the state's step to `num_steps`; evaluates, saves, and records a summary of the whole run.

        Implicit transfers between host and devices raise.

        Raises:
          Interrupted: a signal came; the step that ran was finished and saved. Any other `KeyboardInterrupt` may come
            in the middle of a step: then nothing is saved, and the run resumes from its last checkpoint.
          RunError: a file could not be written, the data or a callback failed, or too many steps were skipped.
        """
        return result(self.steps(state, shows=False))

    def steps(self, state: TrainState, shows: bool = True) -> Shown:
        """As `fit`, and yields the state and the metrics of each step. Returns the last state.

        If the caller closes it, the state that was yielded last is saved.
        """
        running = self._run(state, shows)
        with closing(running):
            while True:
                with jax.transfer_guard("disallow"):  # the caller's code may move data
                    try:
                        found = next(running)
                    except StopIteration as ended:
                        return ended.value
                yield found

    def _run(self, state: TrainState, shows: bool) -> Shown:
        start = end = int(jax.device_get(state.step))
        self.evaluated[:] = evaluations(self.recorder.file, start)
        self.recorder.begin(start, self.config)
        with self._saving.finished():
            # A signal may have ended the run between its last step and the evaluation of that step.
            is_due = start == self.num_steps or self._is_due(start, self.eval_every)
            if start and is_due and start not in (record["step"] for record in self.evaluated):
                self._evaluate(state, start)
            if start < self.num_steps and not self._stops(start):
                self._events.call("on_train_begin", state, start)
                with closing(self.train.batches(start, self._read_rows)) as batches:
                    state, end = yield from self._steps(state, start, batches, shows)
                self._events.call("on_train_end", state, end)
        self.recorder.summarize(end)
        return state

    def _steps(
        self, state: TrainState, start: int, batches: Iterator[Any], shows: bool
    ) -> Generator[tuple[TrainState, StepMetrics], None, tuple[TrainState, int]]:
        """Trains until the run ends; returns the last state and its step. Yields each step if the caller sees it."""
        window = Window(start, counts([state.skipped])[0], self.max_skipped_steps)
        stopwatch = Stopwatch(rows=self.rows)
        stall = Stall(self.source)
        traced = (min(start + 4, self.num_steps), min(start + 6, self.num_steps))
        index = checked_at = start
        saving = self._saving
        saving.begin()
        self.signals.begin()
        needs_state = shows or self._events.has("on_step_end")
        failing = self._events.failing(lambda: index)
        with failing, stall.watched(), profiled(self.profile, *traced, stopwatch) as profiled_step:
            for index in range(start + 1, self.num_steps + 1):
                is_last = index == self.num_steps
                self._events.call("on_step_begin", index)
                with profiled_step(index):
                    state, metrics = self._step(state, index, batches, stopwatch, stall)
                    window.add(metrics)

                is_logged = is_last or index == start + 1 or index % self.log_every == 0
                if is_logged:
                    self._log(index, metrics, stopwatch)
                if index == start + 1:
                    with stopwatch.paused():
                        self.after_first()
                if needs_state:
                    state = self.step.finish(state)
                    self._events.call("on_step_end", state, index, StepMetrics(self.step, metrics))

                means: dict[str, float] = {}
                if is_last or self._events.ends or self._is_due(index, self.eval_every):
                    window.drain()
                    with stopwatch.paused():
                        state = self.step.finish(state)
                        means = self._evaluate(state, index)
                if self.check_replicas_every and index % self.check_replicas_every == 0:
                    self._check_replicas(state, index, checked_at)
                    checked_at = index

                ends = is_last or (bool(means) and self._stops(index)) or self._is_ended(index)
                is_interrupted = saving.agree(index, is_logged)
                saving.is_due |= self._is_due(index, self.checkpoints.retention.every)
                # Skipped steps change no parameter: a checkpoint waits for a step that is finite.
                if ends or is_interrupted or (saving.is_due and not window.drain()):
                    with stopwatch.paused():
                        state = self.step.finish(state)
                        saving.save(state, index, means, keeps_all=window.drain() > 0)
                elif self._is_due(index, self.checkpoints.retention.memory_every) and not window.drain():
                    with stopwatch.paused():
                        state = self.step.finish(state)
                        saving.copy(state, index)
                self._events.saved(self.checkpoints.directory)
                if is_interrupted:
                    raise saving.interrupted(index)
                if shows:
                    yield from self._shown(state, index, metrics)
                if ends:
                    break
        return state, index

    def _step(
        self, state: TrainState, index: int, batches: Iterator[Any], stopwatch: Stopwatch, stall: Stall
    ) -> tuple[TrainState, Metrics]:
        """Reads the batch of a step and starts the step on the devices."""
        self.cursor.at(index, "reads data")
        if self.rollouts:
            state = self.step.finish(state)
        batch = self._next_batch(batches, index, state, stopwatch, stall)
        self.cursor.at(index, "trains")
        placed = put(batch, self.step.batch, self._rows, self.step.order)
        state, metrics = self.step.at(index)(self.step.prepare(state), placed)
        stopwatch.count(metrics["tokens"])
        return state, metrics

    def _shown(self, state: TrainState, index: int, metrics: Metrics) -> Iterator[tuple[TrainState, StepMetrics]]:
        """Yields a step; saves its state if the caller ends the run there."""
        try:
            yield state, StepMetrics(self.step, metrics)
        except GeneratorExit:
            self._saving.wait()
            if self.checkpoints.latest() != index:
                self._saving.save(state, index, {})
            raise

    def _next_batch(
        self, batches: Iterator[Any], index: int, state: TrainState, stopwatch: Stopwatch, stall: Stall
    ) -> Any:
        """The batch of a step.

        Args:
          state: the state before this step, which is saved if a signal comes.

        Raises:
          Interrupted: a signal came to the only process. Several end after the same step, see `Saving.agree`.
          RunError: the data set raised, or has no more batches.
        """
        is_alone = jax.process_count() == 1
        try:
            with stopwatch.waiting(), stall.waiting(index), self.signals.interruptible() if is_alone else nullcontext():
                read = next(batches)
                return self.rollouts.batch(state.params, index, read) if self.rollouts else read
        except Interrupted:
            raise self._interrupted_before(state, index) from None
        except MeshparError as error:
            kind = DataError if isinstance(error, DataError) else RunError
            raise kind(f"step {index}: {error}") from None
        except StopIteration:
            raise RunError(f"step {index}: {self.source} has no more batches") from None
        except Exception as error:
            what = f"{type(error).__name__}: {error}".partition("\n")[0]
            fix = "the same command resumes from the last checkpoint"
            raise RunError(f"step {index}: {self.source} raised {what}; {fix}") from error

    def _interrupted_before(self, state: TrainState, index: int) -> Interrupted:
        """The error to raise after a signal that came before the batch of a step, in the only process."""
        self._saving.wait()
        if self.checkpoints.latest() != index - 1:
            if index == 1:
                return Interrupted(self.signals.nothing_to_save())
            self._saving.save(self.step.finish(state), index - 1, {})
        return self._saving.interrupted(index - 1)

    def _check_replicas(self, state: TrainState, index: int, checked_at: int) -> None:
        """Compares the copies of replicated state. If they differ, checkpoints since the last comparison are not used.

        Raises:
          RunError: copies differ; it names the devices.
        """
        if found := differences(state):
            self._saving.distrust(checked_at)
            what = f"step {index}: copies of the same state differ:"
            why = f"  they were equal at step {checked_at}: a device computed wrongly, or its memory lost a bit"
            fix = "  the same command resumes from a checkpoint before that; if it happens again, replace the device"
            raise RunError("\n".join([what, *found, why, fix]))

    def _is_due(self, index: int, every: int | None) -> bool:
        """Whether an interval ends at this step. The last step is always evaluated and saved, so it is not due."""
        return every is not None and index % every == 0 and index != self.num_steps

    def _log(self, index: int, metrics: Metrics, stopwatch: Stopwatch) -> None:
        # Arrays, such as the load of experts, are rounded: a record is a line of text.
        values = {
            name: np.round(value.astype(float), 6).tolist() if value.ndim else value.item()
            for name, value in self.step.read(metrics).items()
        }
        speed = stopwatch.lap()
        if speed and self.mfu_of:
            speed["mfu"] = self.mfu_of(speed["tokens_per_s"])
        skipped = getattr(self.train, "skipped", None)
        if skipped is not None:
            values["rows_skipped"] = sum(map(int, everyones(str(skipped.count))))
        self.recorder.record("train", index, **values, **speed)

    def _evaluate(self, state: TrainState, index: int) -> dict[str, float]:
        """Records and returns the means over the held-out data; returns none if a signal comes meanwhile."""
        functions = self._functions
        if self.held_out is not None or functions:
            self._events.call("on_evaluation_begin", state, index)
        if self.held_out is None:
            return self._record_evaluation(state, called(functions, state, index, {"tokens"}), index)
        assert self.evaluate, "rows are held out for it"
        params = averaged(state)
        sums_of_batches = []
        gathered = Gathered()
        with closing(self.held_out.batches(rows=self._read_rows)) as held_out:
            for batch in held_out:
                self.cursor.at(index, "evaluates")
                if self.signals.caught and jax.process_count() == 1:
                    return {}
                if self.rollouts:
                    batch = self.rollouts.batch(params, None, batch)
                placed = put(batch, self.step.batch, self._rows, self.step.order)
                sums_of_batches.append(jax.device_get(self.evaluate(params, placed, state.carried)))
                if self.measure and self.measure.of_rows:
                    gathered.add(jax.device_get(self.measure.of_rows(params, placed, state.carried)))
        sums = {name: sum(each[name].item() for each in sums_of_batches) for name in sums_of_batches[0]}
        tokens = sums.pop("tokens")
        means = {name: total / tokens for name, total in sums.items()}
        means |= self.measure.metrics(means, gathered) if self.measure else {}
        means |= called(functions, state, index, {*means, "tokens"})
        return self._record_evaluation(state, means, index, tokens=tokens)

    def _record_evaluation(
        self, state: TrainState, means: dict[str, float], index: int, **more: float
    ) -> dict[str, float]:
        if means:
            self.recorder.record("evaluation", index, **means, **more)
            self.evaluated.append({"step": index, **means, **more})
            self._events.call("on_evaluation_end", state, index, dict(means))
        return means

    def _stops(self, index: int) -> bool:
        """Whether early stopping ends the run here; if so, it is recorded."""
        verdict = self.early_stopping.verdict(self.evaluated) if self.early_stopping else None
        if verdict:
            self.recorder.record("stop", index, **verdict)
        return verdict is not None

    def _is_ended(self, index: int) -> bool:
        """Whether a callback ends the run here; if so, it is recorded."""
        if self._events.ends:
            self.recorder.record("stop", index, why=self._events.ends)
        return self._events.ends is not None

    @cached_property
    def _saving(self) -> Saving:
        return Saving(
            checkpoints=self.checkpoints, recorder=self.recorder, signals=self.signals, events=self._events,
            cursor=self.cursor, copies=self.copies,
        )  # fmt: skip

    @cached_property
    def _sorted(self) -> tuple[Events, list[Callable[..., Any]]]:
        return events_of(self.callbacks, self.held_out is not None)

    @property
    def _events(self) -> Events:
        return self._sorted[0]

    @property
    def _functions(self) -> list[Callable[..., Any]]:
        return self._sorted[1]

    @property
    def _read_rows(self) -> np.ndarray | None:
        """The rows of a batch to read: all, where they become others."""
        return None if self.rollouts else self._rows

    @cached_property
    def _rows(self) -> np.ndarray:
        return local_rows(self.step.batch)
