"""Trains twice, once undisturbed and once under faults, and compares batches, losses and parameters."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshpar.chaos.faults import DEADLY, Injector, PlannedFault
from meshpar.chaos.worker import seen
from meshpar.checkpoint.memory import last_step
from meshpar.checkpoint.saved import find
from meshpar.experiment.config import Run
from meshpar.experiment.elastic import Attempts
from meshpar.launch.supervise import supervise
from meshpar.launch.workers import Ended, Group
from meshpar.mesh.join import INTERRUPTED
from meshpar.progress import say
from meshpar.records.file import FILE, read
from meshpar.train.loop.signals import Interrupted

TOLERANCE = 1e-5
"""The largest difference of a loss or a parameter that counts as equal. On the same mesh there is none."""
LIMIT_S = 15.0
"""The most seconds between the death of a process and the end of its peers."""
HANG_S = 8.0
"""Seconds without a step after which processes count as hung: `LIMIT_S` includes them."""


@dataclass(frozen=True)
class Setup:
    """The processes and folders of both runs.

    Args:
      command: the command of a process, without the run directory.
      num_processes: processes on this machine, which share the devices.
      folder: the folder of the undisturbed and the disturbed run directory.
    """

    run: Run
    command: Sequence[str]
    num_processes: int
    num_devices: int
    folder: Path

    def group(self, run_dir: Path) -> Group:
        logs = run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "meshpar", *self.command, f"run_dir={run_dir}"]
        return Group(command, self.num_processes, logs, hang_s=HANG_S, is_quiet=True)


@dataclass(frozen=True)
class Result:
    """The outcome of a run.

    Args:
      seconds: the time from its first start to its end.
      ended: the end of its last attempt.
      faults: the faults that were injected.
      end_s: for each fault that left a process dead or hanging, the seconds until all had ended.
    """

    run_dir: Path
    seconds: float
    ended: Ended
    faults: Sequence[PlannedFault] = ()
    end_s: Sequence[float] = ()

    def losses(self) -> dict[int, float]:
        return {r["step"]: r["loss"] for r in read(self.run_dir / FILE) if r["kind"] == "train"}

    def params(self) -> dict[str, np.ndarray]:
        saved = find(self.run_dir)
        return {path: saved.on_host(path) for path in saved.meta["arrays"] if path.startswith("params.")}

    def last_step(self) -> int:
        return find(self.run_dir).step


def undisturbed(setup: Setup) -> Result:
    """Runs the training without faults.

    Raises:
      Interrupted: a signal came to this process.
    """
    run_dir = setup.folder / "undisturbed"
    began = time.monotonic()
    ended = setup.group(run_dir).run()
    _check_signals(ended)
    return Result(run_dir, time.monotonic() - began, ended)


def disturbed(setup: Setup, faults: Sequence[PlannedFault], seed: int) -> Result:
    """Runs the training under faults. After a signal to a process of it, it starts again, as under a scheduler.

    Raises:
      Interrupted: a signal came to this process.
    """
    run_dir = setup.folder / f"seed-{seed}"
    injector = Injector(run_dir, list(faults), random.Random(seed))
    end_s: list[float] = []

    attempts = Attempts(setup.run, setup.group(run_dir), setup.num_devices, injector)

    def attempt(size: int) -> Ended:
        num_before = len(injector.injected)
        ended = attempts(size)
        _check_signals(ended)
        for fault, when in injector.injected[num_before:]:
            say(f"meshpar: {fault.kind} at step {fault.step}, in process {fault.process % size}")
            if fault.kind in DEADLY:
                end_s.append(time.monotonic() - when)
        return ended

    began = time.monotonic()
    while True:
        ended = supervise(attempt, len(faults) + 1, lambda: last_step(run_dir), attempts.members)
        if ended.code != INTERRUPTED:
            break
    came = [fault for fault, _ in injector.injected]
    return Result(run_dir, time.monotonic() - began, ended, came, end_s)


def _check_signals(ended: Ended) -> None:
    """A signal to this process is the user's, and no fault of the trial."""
    if ended.signals:
        raise Interrupted(
            "stopped by a signal: nothing was compared; chaos starts from the beginning, in an empty run_dir"
        )


@dataclass(frozen=True)
class RunComparison:
    """The comparison of the disturbed with the undisturbed run.

    Args:
      differences: the differences, as text; empty if nothing was lost.
    """

    expected: Result
    found: Result
    differences: Sequence[str] = field(default=())

    @property
    def goodput(self) -> float:
        """The time of the undisturbed run divided by that of the disturbed one."""
        return self.expected.seconds / self.found.seconds

    def __str__(self) -> str:
        kinds = ", ".join(fault.kind for fault in self.found.faults) or "none"
        times = f"{self.found.seconds:.1f} s, undisturbed {self.expected.seconds:.1f} s"
        lines = [f"faults    {kinds}", f"time      {times}: goodput {self.goodput:.2f}"]
        if self.found.end_s:
            lines.append(f"ends      at most {max(self.found.end_s):.1f} s after a process died or hung")
        lines += self.differences or ["equal     losses, parameters and batches are those of the undisturbed run"]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        return {
            "faults": [vars(fault) for fault in self.found.faults],
            "seconds": self.found.seconds,
            "undisturbed_s": self.expected.seconds,
            "goodput": self.goodput,
            "end_s": list(self.found.end_s),
            "differences": list(self.differences),
        }


def compare(expected: Result, found: Result, num_planned: int) -> RunComparison:
    comparison = RunComparison(expected, found)
    for result in (expected, found):
        if result.ended.code:
            return replace(comparison, differences=[f"{result.run_dir.name} failed: {result.ended.why}"])
    checks: list[Callable[[], str]] = [
        lambda: _number("step", {"last": expected.last_step()}, {"last": found.last_step()}),
        lambda: _number("loss of step", expected.losses(), found.losses()),
        lambda: _number("parameter", expected.params(), found.params()),
        lambda: _batches(seen(expected.run_dir), seen(found.run_dir)),
    ]
    differences = [difference for check in checks if (difference := check())]
    if len(found.faults) < num_planned:
        differences.append(f"only {len(found.faults)} of {num_planned} faults came: the run is too short")
    late = [seconds for seconds in found.end_s if seconds > LIMIT_S]
    if late:
        differences.append(f"a process outlived a dead peer by {max(late):.1f} s, more than {LIMIT_S:.0f}")
    return replace(comparison, differences=differences)


def _number(what: str, expected: dict[Any, Any], found: dict[Any, Any]) -> str:
    """The largest difference of numbers or arrays as text; empty within `TOLERANCE`."""
    if expected.keys() != found.keys():
        return f"{what}: only one of the runs has {sorted(expected.keys() ^ found.keys())[:5]}"
    largest = {key: float(np.max(np.abs(np.subtract(found[key], expected[key])))) for key in expected}
    worst = max(largest, key=lambda key: (not np.isfinite(largest[key]), largest[key]))
    return "" if largest[worst] <= TOLERANCE else f"{what} {worst} differs by {largest[worst]:.1e}"


def _batches(expected: dict[tuple[int, int], set[int]], found: dict[tuple[int, int], set[int]]) -> str:
    wrong = [place for place in expected.keys() | found.keys() if expected.get(place) != found.get(place)]
    return f"row {min(wrong)[1]} of the batch of step {min(wrong)[0]} differs" if wrong else ""
