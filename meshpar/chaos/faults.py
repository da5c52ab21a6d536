"""Faults, and when they come: at random steps, the same for the same seed."""

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
"""How long a slow process stands still."""


Fault = Callable[[Worker, Path, random.Random], bool]
"""Injects a fault into a process of the run in a folder. It returns False if it cannot yet."""


def sends(number: signal.Signals) -> Fault:
    """A fault that is a signal."""

    def send(worker: Worker, run_dir: Path, draw: random.Random) -> bool:
        worker.send(number)
        return True

    return send


def slow(worker: Worker, run_dir: Path, draw: random.Random) -> bool:
    """A process stands still for a while."""
    worker.send(signal.SIGSTOP)
    time.sleep(SLOW_S)
    worker.send(signal.SIGCONT)
    return True


def full_disk(worker: Worker, run_dir: Path, draw: random.Random) -> bool:
    """Every write to a file fails (EFBIG, a size limit of the kernel's, which needs no disk of its own)."""
    resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    return True


def corrupt(worker: Worker, run_dir: Path, draw: random.Random) -> bool:
    """A bit of the newest checkpoint flips on the disk, and a process dies, so that the checkpoint is read."""
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
    """A bit of a process's copy of the state flips in memory."""
    (run_dir / FLIP).write_text(str(worker.index))
    return True


FAULTS: Mapping[str, Fault] = {
    "kill": sends(signal.SIGKILL),  # as the kernel does when memory runs out
    "stop": sends(signal.SIGSTOP),  # the process no longer runs, and does not end
    "corrupt": corrupt,
    "full-disk": full_disk,
    "sigterm": sends(signal.SIGTERM),  # as a scheduler does that wants a host back
    "slow": slow,
    "flip": flip,
}
DEADLY = ("kill", "stop", "corrupt")


@dataclass(frozen=True)
class Planned:
    """A fault, the step from which it is due, and a number that selects the process."""

    kind: str
    step: int
    process: int


def plan(kinds: Sequence[str], num_steps: int, seed: int) -> list[Planned]:
    """One fault of each kind, in random order: one in each of as many equal parts of the run."""
    draw = random.Random(seed)
    order = draw.sample(kinds, len(kinds))
    part = num_steps / (len(kinds) + 1)
    at = [round(part * (i + draw.uniform(0.25, 0.95))) for i in range(len(kinds))]
    return [Planned(kind, step, draw.randrange(2**16)) for kind, step in zip(order, at, strict=True)]


@dataclass
class Injector:
    """Injects planned faults, one after the other, while a program runs. `Group.run` calls it at each poll.

    Args:
      left: the faults that did not come yet.
      injected: each fault that came, and when, in seconds of `time.monotonic`.
    """

    run_dir: Path
    left: list[Planned]
    draw: random.Random
    injected: list[tuple[Planned, float]] = field(default_factory=list)

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
