"""A source of data that keeps a run waiting is named: after a while, and again at distances that double."""

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
    """Watches how long a batch is waited for.

    Args:
      source: what the batches are read from, as people know it.
      clock: seconds that only grow.
      first_s: after so many seconds the first warning.

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
        """Within, the batch of a step is waited for."""
        self._step = step
        self._next_s = self.first_s
        self._since = self.clock()
        try:
            yield
        finally:
            self._since = None

    def warning(self) -> str | None:
        """What to say now, if anything: each time the wait has doubled."""
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
        """Within, a thread prints the warnings."""
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
