"""Saves a training: checkpoints on disk, copies in memory, and what a signal or a request asks for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshpar.checkpoint.checkpoints import Checkpoints
from meshpar.mesh.cursor import Cursor
from meshpar.records.metrics import Recorder
from meshpar.records.writing import writing
from meshpar.train.copies.copies import Copies
from meshpar.train.loop.events import Events
from meshpar.train.loop.signals import Interrupted, Signals
from meshpar.train.state import TrainState


@dataclass(kw_only=True)
class Saving:
    """Saves the state of a `Loop`, whose fields its own are.

    Args:
      is_due: whether the next finite step is to be saved.
      saved_at: when the last checkpoint was begun, in seconds of the monotonic clock.
    """

    checkpoints: Checkpoints
    recorder: Recorder
    signals: Signals
    events: Events
    cursor: Cursor
    copies: Copies | None
    is_due: bool = False
    saved_at: float = 0.0

    def begin(self) -> None:
        """Starts the interval to the next checkpoint."""
        self.is_due, self.saved_at = False, time.monotonic()

    def agree(self, index: int, is_logged: bool) -> bool:
        """Whether a signal ends the run after this step; notes whether a checkpoint is overdue or requested.

        Several processes end after the same step. JAX's coordination service chooses it once a process has a signal.
        The first process decides at logged steps whether a checkpoint is overdue or requested.
        """
        every = self.checkpoints.retention.every_minutes
        is_overdue = every is not None and time.monotonic() - self.saved_at >= 60 * every
        is_overdue = is_overdue or (is_logged and self._request.exists())
        if jax.process_count() == 1:
            self.is_due |= is_overdue
            return self.signals.caught is not None
        is_interrupted = multihost_utils.reached_preemption_sync_point(index)
        if is_logged:
            with jax.transfer_guard("allow"):
                self.is_due |= bool(multihost_utils.broadcast_one_to_all(np.array(is_overdue)))
        return is_interrupted

    def save(self, state: TrainState, index: int, means: dict[str, float], keeps_all: bool = False) -> None:
        """Starts to save a checkpoint, and waits for it if it was requested.

        Args:
          means: of the evaluation of this step, by which the best checkpoint is chosen.
          keeps_all: whether no older one is removed, after the last one of a run.
        """
        self.recorder.check()
        self.cursor.at(index, "saves")
        if keeps_all or self.events.unsaved:
            self.wait()
        if keeps_all:
            self.checkpoints.retention = self.checkpoints.retention.without_end()
        began = time.monotonic()
        with writing("a checkpoint", self.checkpoints.directory):
            self.checkpoints.save(index, state, means)
        self.events.saving(index)
        self.recorder.record("checkpoint", index, blocked_s=time.monotonic() - began)
        self._answer_request()
        self.begin()

    def copy(self, state: TrainState, index: int) -> None:
        """Starts to copy the state to the memory of the hosts."""
        if self.copies:
            self.cursor.at(index, "copies")
            began = time.monotonic()
            self.copies.save(index, state)
            self.recorder.record("copy", index, blocked_s=time.monotonic() - began)

    def wait(self) -> None:
        """Waits until all checkpoints are on disk."""
        with writing("a checkpoint", self.checkpoints.directory):
            self.checkpoints.wait()
        self.events.saved(self.checkpoints.directory)

    @contextmanager
    def finished(self) -> Iterator[None]:
        """On exit, waits until all checkpoints are on disk. If the body raises too, its error is the one raised."""
        try:
            yield
            self.wait()
            self._discard_copies()
        except BaseException:
            with suppress(Exception):
                self.checkpoints.wait()
            raise

    def interrupted(self, index: int) -> Interrupted:
        """The error to raise after a signal; waits until the checkpoint of this step is on disk."""
        self.wait()
        self._discard_copies()
        where = self.recorder.file.parent / self.checkpoints.directory.name / str(index)
        fix = "the same command resumes from it"
        return Interrupted(f"stopped by {self.signals.name} at step {index}; checkpoint in {where}; {fix}")

    def distrust(self, index: int) -> None:
        """Marks what was saved after this step as not to be used."""
        self.wait()
        self.checkpoints.distrust(index)
        self._discard_copies()

    def _discard_copies(self) -> None:
        if self.copies:
            self.copies.discard()

    def _answer_request(self) -> None:
        """Removes the file that requests a checkpoint, once the checkpoint is on disk."""
        if jax.process_index() == 0 and self._request.exists():
            self.wait()
            self._request.unlink(missing_ok=True)

    @property
    def _request(self) -> Path:
        """The file with which anybody requests a checkpoint: `touch RUN_DIR/save`."""
        return self.recorder.file.with_name("save")
