"""Warns when the data stalls: after a while, and again each time the wait has doubled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime

from meshpar.progress import say

FIRST_S = 30.0
LOOK_S = 1.0


@dataclass
class Stall:
    """Measures how long the run has been waiting for a batch.

    Args:
      source: name of the data, for the warnings.
      clock: monotonic time in seconds.
      first_s: seconds until the first warning.

    >>> now = iter([0.0, 29.0, 30.0, 59.0, 60.0])
    >>> stall = Stall("jsonl corpus", clock=lambda: next(now))
    >>> with stall.waiting(7):
    ...     [stall.warning() is None for _ in range(4)]
    [True, False, True, False]
    """

    source: str
    clock: Callable[[], float] = time.monotonic
    first_s: float = FIRST_S
    _since: float | None = field(default=None, init=False)
    _step: int = field(default=0, init=False)
    _next_s: float = field(default=0.0, init=False)

    @contextmanager
    def waiting(self, step: int) -> Iterator[None]:
        """Counts the time within as waiting for the batch of a step."""
        self._step = step
        self._next_s = self.first_s
        self._since = self.clock()
        try:
            yield
        finally:
            self._since = None

    def warning(self) -> str | None:
        """The warning that is due now, if any."""
        since = self._since
        if since is None:
            return None
        waited_s = self.clock() - since
        if waited_s < self._next_s:
            return None
        self._next_s *= 2
        began = datetime.fromtimestamp(time.time() - waited_s).strftime("%H:%M:%S")
        what = f"step {self._step} has waited {waited_s:.0f} s for a batch, since {began}"
        return f"{what}: data from {self.source} stalls"

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Prints the warnings within, from a thread."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(LOOK_S):
                text = self.warning()
                if text:
                    say(f"meshpar: {text}")

        thread = threading.Thread(target=watch, name="stall", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
