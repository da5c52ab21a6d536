"""Counts the steps that were skipped in a row, and bounds their number."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from meshpar.errors import RunError
from meshpar.train.program import counts
from meshpar.train.step import IN_FLIGHT, Metrics


@dataclass
class Window:
    """The steps whose metrics have not been read yet.

    The metrics of a step have the number of steps skipped so far. Reading a number from a device takes as long as the
    Python of a whole step. So only the last of `limit` steps is read, and the others only if the number has changed.
    The last `IN_FLIGHT` steps are not read, because they may not have ended.

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
    unread: list[jax.Array] = field(default_factory=list)

    def add(self, metrics: Metrics) -> None:
        """Adds the metrics of a step that has begun.

        Raises:
          RunError: `limit` steps in a row were skipped.
        """
        self.unread.append(metrics["skipped"])
        if self.limit and len(self.unread) >= IN_FLIGHT + self.limit:
            self._read(len(self.unread) - IN_FLIGHT)

    def drain(self) -> int:
        """Waits for all steps; returns the number of skipped steps in a row at their end. Raises as `add` does."""
        self._read(len(self.unread))
        return self.in_a_row

    def _read(self, num_steps: int) -> None:
        """Reads the first steps that were not read."""
        read = self.unread[:num_steps]
        del self.unread[:num_steps]
        if not read:
            return
        if counts(read[-1:]) == [self.skipped]:
            self.step += len(read)
            self.in_a_row = 0
            return
        for count in counts(read):
            self.step += 1
            self.in_a_row = self.in_a_row + 1 if count > self.skipped else 0
            self.skipped = count
            if self.limit and self.in_a_row >= self.limit:
                raise self._error()

    def _error(self) -> RunError:
        first = self.step - self.in_a_row + 1
        what = f"loss or gradients were not finite in {self.in_a_row} steps in a row, from step {first} on"
        fix = "a lower optim.lr, optim.clip_norm or a wider precision may help; max_skipped_steps sets the bound"
        return RunError(f"the run stopped after step {self.step}: {what}, and each was skipped; {fix}")
