"""Plans faults at random steps, which a seed determines, and injects them into processes."""

from __future__ import annotations

import random
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshpar.chaos.worker import FLIP
from meshpar.checkpoint.arrays import is_chunk
from meshpar.checkpoint.saved import FOLDER, STATE, steps
from meshpar.launch.workers import Worker

SLOW_S = 1.5
"""Seconds for which a slow process is stopped."""


Fault = Callable[[Worker, Path, random.Random], bool]
"""Injects a fault into a process of the run in a folder; returns False if that is not possible yet."""


def sends(number: signal.Signals) -> Fault:
    """A fault that is a signal."""

    def send(worker: Worker, run_dir: Path, draw: random.Random) -> bool:
        worker.send(number)
        return True

    return send


def slow(worker: Worker, run_dir: Path, draw: random.Random) -> bool:
    """Stops a process for `SLOW_S`."""
    worker.send(signal.SIGSTOP)
    time.sleep(SLOW_S)
    worker.send(signal.SIGCONT)
    return True


def full_disk(worker: Worker, run_dir: Path, draw: random.Random) -> bool:
    """Makes every write to a file fail with EFBIG, by the kernel's size limit, which needs no separate disk."""
    resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    return True


def corrupt(worker: Worker, run_dir: Path, draw: random.Random) -> bool:
    """Flips a bit of the newest checkpoint on the disk, and kills a process, so that the checkpoint is read."""
    folder = run_dir / FOLDER
    saved = steps(folder)
    if len(saved) < 2:  # there must be an earlier one to resume from
        return False
    state = folder / str(saved[-1]) / STATE
    chunks = sorted(path for path in state.rglob("*") if path.is_file() and is_chunk(str(path.relative_to(state))))
    path = draw.choice(chunks)
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    worker.send(signal.SIGKILL)
    return True


def flip(worker: Worker, run_dir: Path, draw: random.Random) -> bool:
    """Requests that a process flips a bit of its copy of the state in memory."""
    (run_dir / FLIP).write_text(str(worker.index))
    return True


FAULTS: Mapping[str, Fault] = {
    "kill": sends(signal.SIGKILL),  # as the kernel does when memory runs out
    "stop": sends(signal.SIGSTOP),  # the process no longer runs, and does not end
    "corrupt": corrupt,
    "full-disk": full_disk,
    "sigterm": sends(signal.SIGTERM),  # as a scheduler does to reclaim a host
    "slow": slow,
    "flip": flip,
}
DEADLY = ("kill", "stop", "corrupt")


@dataclass(frozen=True)
class PlannedFault:
    """A planned fault: its kind, the step from which it is due, and a number that selects the process."""

    kind: str
    step: int
    process: int


def plan(kinds: Sequence[str], num_steps: int, seed: int) -> list[PlannedFault]:
    """A fault of each kind, in random order, each in another part of the run; the parts are equal."""
    draw = random.Random(seed)
    order = draw.sample(kinds, len(kinds))
    part = num_steps / (len(kinds) + 1)
    at = [round(part * (i + draw.uniform(0.25, 0.95))) for i in range(len(kinds))]
    return [PlannedFault(kind, step, draw.randrange(2**16)) for kind, step in zip(order, at, strict=True)]


@dataclass
class Injector:
    """Injects planned faults, one after the other, while a program runs. `Group.run` calls it at each poll.

    Args:
      left: the faults that are not injected yet.
      injected: each injected fault, with its time in seconds of `time.monotonic`.
    """

    run_dir: Path
    left: list[PlannedFault]
    draw: random.Random
    injected: list[tuple[PlannedFault, float]] = field(default_factory=list)

    def __call__(self, workers: Sequence[Worker]) -> bool:
        positions = [worker.position for worker in workers]
        flipping = (self.run_dir / FLIP).exists()
        if not self.left or flipping or any(position is None for position in positions):
            return False
        fault = self.left[0]
        is_due = all(position and position.step >= fault.step for position in positions)
        worker = workers[fault.process % len(workers)]
        if is_due and worker.code is None and FAULTS[fault.kind](worker, self.run_dir, self.draw):
            self.left.pop(0)
            self.injected.append((fault, time.monotonic()))
        return False
