"""Starts a run again after a failure, from its last checkpoint, unless another attempt would fail alike."""

from __future__ import annotations

from collections.abc import Callable

from meshpar.launch.workers import Ended
from meshpar.mesh.join import INTERRUPTED
from meshpar.progress import say

FINAL = (0, 2, INTERRUPTED)
"""Exit codes after which no attempt follows: the end, bad input, and a signal to the run."""
ALIKE = 2
"""How many attempts in a row may fail at the same checkpoint."""


def supervise(attempt: Callable[[], Ended], restarts: int, newest: Callable[[], int | None]) -> Ended:
    """Repeats an attempt until it ends well.

    Args:
      restarts: the most attempts after the first.
      newest: the step of the last checkpoint; None without one.

    Returns:
      How the last attempt ended, and why none follows.

    >>> ends = iter([Ended(137, "process 1 was killed"), Ended(0)])
    >>> checkpoints = iter([10, 20])
    >>> supervise(lambda: next(ends), 3, lambda: next(checkpoints)).code
    0
    """
    before = newest()
    num_alike = 0
    for left in range(restarts - 1, -1, -1):
        ended = attempt()
        if ended.code in FINAL:
            return ended
        last = newest()
        num_alike = num_alike + 1 if last == before else 1
        before = last
        where = "the beginning" if last is None else f"checkpoint {last}"
        if num_alike > ALIKE:
            why = f"{num_alike} attempts in a row failed and none came beyond {where}: the failure is not by chance"
            return Ended(ended.code, f"{ended.why}\n{why}")
        say(f"meshpar: {ended.why}\n  starts again from {where}; {left} more restarts are left")
    return attempt()
