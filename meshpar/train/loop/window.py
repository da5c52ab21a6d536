"""Bounds the number of steps in flight, and of steps skipped in a row."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import jax

from meshpar.errors import RunError
from meshpar.train.program import counts
from meshpar.train.step import Metrics

# With more than about 32 steps in flight on simulated devices, jax 0.10 hangs.
IN_FLIGHT = 8


@dataclass
class Window:
    """The steps that the host has started, but not yet waited for.

    The metrics of a step have the number of steps skipped so far. Reading a number from a device takes as long as the
    Python of a whole step. So only the last of `limit` steps is read, and the others only if the number has changed.

    Args:
      step: the last step that was read.
      skipped: number of steps skipped up to that step.
      limit: the run fails after this many skipped steps in a row; None for no limit.
      in_a_row: number of skipped steps in a row up to `step`.
    """

    step: int
    skipped: int
    limit: int | None
    in_a_row: int = 0
    in_flight: deque[Metrics] = field(default_factory=deque)
    finished: list[jax.Array] = field(default_factory=list)

    def add(self, metrics: Metrics) -> None:
        """Adds the metrics of a step that was started, and waits for the step that is `IN_FLIGHT` before it.

        Raises:
          RunError: `limit` steps in a row were skipped.
        """
        self.in_flight.append(metrics)
        if len(self.in_flight) > IN_FLIGHT:
            self._wait()
            if self.limit and len(self.finished) >= self.limit:
                self._read()

    def drain(self) -> int:
        """Waits for all steps; returns the number of skipped steps in a row at their end. Raises as `add` does."""
        while self.in_flight:
            self._wait()
        self._read()
        return self.in_a_row

    def _wait(self) -> None:
        done = self.in_flight.popleft()
        jax.block_until_ready(done)
        self.finished.append(done["skipped"])

    def _read(self) -> None:
        if not self.finished:
            return
        if counts(self.finished[-1:]) == [self.skipped]:
            self.step += len(self.finished)
            self.in_a_row = 0
        else:
            for count in counts(self.finished):
                self.step += 1
                self.in_a_row = self.in_a_row + 1 if count > self.skipped else 0
                self.skipped = count
                if self.limit and self.in_a_row >= self.limit:
                    raise self._error()
        self.finished = []

    def _error(self) -> RunError:
        first = self.step - self.in_a_row + 1
        what = f"loss or gradients were not finite in {self.in_a_row} steps in a row, from step {first} on"
        fix = "a lower optim.lr, optim.clip_norm or a wider precision may help; max_skipped_steps sets the bound"
        return RunError(f"the run stopped after step {self.step}: {what}, and each was skipped; {fix}")
