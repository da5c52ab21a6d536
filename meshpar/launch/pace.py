"""Learns from the steps of a run after how many seconds without one its processes hang."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from meshpar.mesh.cursor import Position

UNKNOWN_S = 300.0
"""The limit until the steps of the run are known."""
LEAST_S = 30.0
FACTOR = 10
"""How much longer than the median a step may take."""
FEWEST, MOST = 5, 100
"""The number of steps from which the median is known, and of those that it is made of."""


@dataclass
class Pace:
    """The pace of a run.

    Args:
      given_s: the limit, if the user sets it.

    >>> pace = Pace()
    >>> for step in range(10):
    ...     pace.look([Position(step, "trains", 0.0)] * 2, now=8.0 * step)
    >>> pace.limit_s
    80.0
    """

    given_s: float | None = None
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=MOST))
    last: tuple[int, float] | None = None

    @property
    def limit_s(self) -> float:
        """Seconds without a step after which the processes count as hung."""
        if self.given_s is not None:
            return self.given_s
        return max(LEAST_S, FACTOR * median(self.steps_s)) if len(self.steps_s) >= FEWEST else UNKNOWN_S

    def look(self, positions: Sequence[Position | None], now: float) -> None:
        """Takes note of the steps at a time in seconds. Only steps between which all processes train count."""
        known = [position for position in positions if position and position.phase in ("trains", "reads data")]
        if len(known) < len(positions) or not known:
            self.last = None
            return
        step = min(position.step for position in known)
        if self.last is None:
            self.last = (step, now)
        elif step > self.last[0]:
            self.steps_s.append((now - self.last[1]) / (step - self.last[0]))
            self.last = (step, now)
