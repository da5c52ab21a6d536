"""Restarts a run after a failure from its last checkpoint, unless another attempt would fail in the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshpar.launch.elastic import Membership
from meshpar.launch.workers import Ended
from meshpar.mesh.join import INTERRUPTED
from meshpar.progress import say

FINAL = (0, 2, INTERRUPTED)
"""Exit codes after which no attempt follows: success, bad input, and a signal to the run."""
ALIKE = 2
"""The number of attempts in a row that may fail at the same checkpoint."""


def supervise(
    attempt: Callable[[int], Ended], restarts: int, newest: Callable[[], int | None], members: Membership
) -> Ended:
    """Repeats an attempt until it succeeds.

    Args:
      attempt: runs the program in the given number of processes.
      restarts: the most attempts after a failure. An attempt that ended because processes returned does not count.
      newest: the step of the last checkpoint; None without one.
      members: the processes that the run can have.

    Returns:
      The end of the last attempt, and the reason why none follows.

    >>> ends = iter([Ended(137, "process 1 was killed"), Ended(0)])
    >>> checkpoints = iter([10, 20])
    >>> supervise(lambda size: next(ends), 3, lambda: next(checkpoints), Membership(2)).code
    0
    """
    before = newest()
    num_alike = 0
    while True:
        size = members.wait()
        ended = attempt(size)
        if ended.code == INTERRUPTED and ended.is_asked:
            size = members.size()
            say(f"meshpar: processes returned; the run continues from checkpoint {newest()} with {size} of them")
            continue
        if ended.code in FINAL:
            return ended
        last = newest()
        if ended.signals or not restarts:
            return replace(ended, why=f"{ended.why}\n{_way_on(last)}")
        num_alike = num_alike + 1 if last == before else 1
        before = last
        where = "the beginning" if last is None else f"checkpoint {last}"
        if num_alike > ALIKE:
            why = f"{num_alike} attempts in a row failed and none came beyond {where}: the failure is not by chance"
            return replace(ended, why=f"{ended.why}\n{why}")
        restarts -= 1
        members.lose(ended.num_lost)
        what = _what_follows(members)
        say(f"meshpar: {ended.why}\n  starts again from {where}{what}; {restarts} more restarts are left")


def _way_on(last: int | None) -> str:
    if last is None:
        return "there is no checkpoint: the same command begins again"
    return f"the same command resumes from checkpoint {last}"


def _what_follows(members: Membership) -> str:
    """The number of processes with which the run continues, if not with all."""
    size = members.size()
    if size == members.num_processes:
        return ""
    if not size:
        return ", once a process returns: the layout does not allow the remaining number of processes"
    return f" with {size} of {members.num_processes} processes"
