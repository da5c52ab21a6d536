"""Processes on this machine that run one program: they start together, and none outlives a peer that failed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from meshpar.mesh.join import LIFELINE, Place

LOOPBACK = "127.0.0.1"
POLL_S = 0.1
GRACE_S = 10.0
"""How long processes may take to end by themselves after a peer has ended."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
QUOTED_LINES = 15


@dataclass(frozen=True)
class Worker:
    """A process of the program.

    Args:
      log: the file of its output; None for the first process, which prints to the terminal.
    """

    index: int
    process: subprocess.Popen[bytes]
    log: Path | None

    @property
    def code(self) -> int | None:
        """Its exit code, as a shell counts it; None while it runs."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code


@dataclass(frozen=True)
class Ended:
    """How a program ended.

    Args:
      code: the exit code of the process that failed first; 0 if none failed.
      worker: that process; None if none failed.
      killed: the processes that did not end by themselves within `GRACE_S` after it.
    """

    code: int
    worker: Worker | None = None
    killed: Sequence[int] = ()

    def __str__(self) -> str:
        if self.worker is None:
            return "all processes ended"
        lines = [f"process {self.worker.index} ended first, with exit code {self.code}"]
        if self.killed:
            lines[0] += f"; {_named(self.killed)} did not end within {GRACE_S:.0f} s and got SIGKILL"
        if self.worker.log:
            quoted = self.worker.log.read_text(errors="replace").splitlines()[-QUOTED_LINES:]
            lines += [f"the last lines of {self.worker.log}:", *(f"  | {line}" for line in quoted)]
        return "\n".join(lines)


def run(command: Sequence[str], num_processes: int, logs: Path, port: int | None = None) -> Ended:
    """Runs a command in several processes, to its end.

    The first process prints to the terminal; the others append to `logs/process-N.log`. Signals go to all processes.
    When one fails, the others have `GRACE_S` to end. If this process ends, however it does, all of them end at once.

    Args:
      command: a program that calls `meshpar.join`, and its arguments.
      port: where the first process listens, on loopback; by default a free one.
    """
    address = f"{LOOPBACK}:{port or free_port()}"
    places = [Place("meshpar launch", num_processes, index, address) for index in range(num_processes)]
    with ExitStack() as stack:
        lifeline, held = os.pipe()
        stack.callback(os.close, held)
        signals = stack.enter_context(_signals())
        workers: list[Worker] = []
        stack.callback(_kill, workers)
        for place in places:
            workers.append(_start(command, place, logs, lifeline))
        os.close(lifeline)
        return _wait(workers, signals)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def _start(command: Sequence[str], place: Place, logs: Path, lifeline: int) -> Worker:
    log = None
    with ExitStack() as stack:
        output = None
        if place.index:
            log = logs / f"process-{place.index}.log"
            output = stack.enter_context(log.open("ab"))
            output.write(f"--- {datetime.now(UTC).isoformat(timespec='seconds')}\n".encode())
            output.flush()
        process = subprocess.Popen(
            command,
            env=os.environ | place.variables() | {LIFELINE: str(lifeline)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(lifeline,),
            start_new_session=True,  # the terminal's Ctrl-C comes here, and is forwarded to all of them alike
        )
    return Worker(place.index, process, log)


def _wait(workers: Sequence[Worker], signals: list[int]) -> Ended:
    """Waits until all processes have ended, and ends the others when one fails."""
    first: Worker | None = None
    deadline = None
    num_forwarded = 0
    while running := [worker for worker in workers if worker.code is None]:
        if len(signals) > num_forwarded:
            # A second signal ends processes at once, as it does for a single one.
            _send(running, signals[num_forwarded] if num_forwarded == 0 else signal.SIGKILL)
            num_forwarded += 1
        first = first or next((worker for worker in workers if worker.code), None)
        if first and deadline is None:
            deadline = time.monotonic() + GRACE_S
            _send(running, signal.SIGTERM)
        if deadline and time.monotonic() > deadline:
            killed = [worker.index for worker in running]
            _kill(running)
            return _ended(first, killed)
        time.sleep(POLL_S)
    return _ended(first or next((worker for worker in workers if worker.code), None), [])


def _ended(first: Worker | None, killed: Sequence[int]) -> Ended:
    return Ended(first.code or 0, first, killed) if first else Ended(0)


def _send(workers: Sequence[Worker], number: int) -> None:
    for worker in workers:
        if worker.code is None:
            worker.process.send_signal(number)


def _kill(workers: Sequence[Worker]) -> None:
    _send(workers, signal.SIGKILL)
    for worker in workers:
        worker.process.wait()


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals that came, in order, while it is open."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.signal(number, note) for number in FORWARDED}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _named(indices: Sequence[int]) -> str:
    names = ", ".join(map(str, indices))
    return f"process {names}" if len(indices) == 1 else f"processes {names}"
