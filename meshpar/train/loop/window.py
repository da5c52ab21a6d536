"""The steps in flight, and how many of the last ones in a row were skipped."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import jax

from meshpar.errors import RunError
from meshpar.train.step import Metrics

# jax 0.10 on simulated devices stops for ever with more than about 32 steps in flight.
IN_FLIGHT = 8


@dataclass
class Window:
    """Steps whose metrics nobody has waited for yet.

    A step counts the skipped steps up to itself. Reading one number from a device takes as long as the Python of a
    whole step, so the count is read once in `limit` steps, and of each of these only if it has changed.

    Args:
      step: the step before the first.
      skipped: how many steps were skipped up to there.
      limit: how many steps in a row may be skipped; None for any number.
      in_a_row: how many of the last steps that were read were skipped.
    """

    step: int
    skipped: int
    limit: int | None
    in_a_row: int = 0
    in_flight: deque[Metrics] = field(default_factory=deque)
    finished: list[jax.Array] = field(default_factory=list)

    def add(self, metrics: Metrics) -> None:
        """Takes the metrics of a step that has begun, and waits for the step `IN_FLIGHT` before it.

        Raises:
          RunError: `limit` steps in a row were skipped.
        """
        self.in_flight.append(metrics)
        if len(self.in_flight) > IN_FLIGHT:
            self._wait()
            if self.limit and len(self.finished) >= self.limit:
                self._read()

    def drain(self) -> int:
        """Waits for all steps; returns how many of the last ones in a row were skipped. Raises as `add` does."""
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
        counts = self.finished
        if int(jax.device_get(counts[-1])) == self.skipped:
            self.step += len(counts)
            self.in_a_row = 0
        else:
            for count in map(int, jax.device_get(counts)):
                self.step += 1
                self.in_a_row = self.in_a_row + 1 if count > self.skipped else 0
                self.skipped = count
                self._check()
        self.finished = []

    def _check(self) -> None:
        if self.limit and self.in_a_row >= self.limit:
            first = self.step - self.in_a_row + 1
            what = f"loss or gradients were not finite in {self.in_a_row} steps in a row, from step {first} on"
            fix = "a lower optim.lr, optim.clip_norm or a wider precision may help; max_skipped_steps sets the bound"
            raise RunError(f"the run stopped after step {self.step}: {what}, and each was skipped; {fix}")
