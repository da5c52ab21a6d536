"""Runs one program in several processes of this machine: they start together, and none outlives a failed peer."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from meshpar.launch.pace import Pace
from meshpar.launch.relay import relayed, without_noise
from meshpar.mesh import cursor
from meshpar.mesh.cursor import Position
from meshpar.mesh.join import DUMP, INTERRUPTED, LIFELINE, LOOPBACK, SIGNALS, STACKS, Place

POLL_S = 0.1
GRACE_S = 5.0
"""Seconds in which processes may end by themselves after a peer has failed. Without the peer they cannot save."""
AFTER_KILL_S = 1.0
"""`GRACE_S` after a peer was killed: the others can only wait for it in a collective."""
DUMP_S = 1.0
"""Seconds in which processes print their stacks."""
HUNG = 124
"""The exit code of a program that hangs, which `timeout` uses too."""
QUOTED_LINES = 15
GPUS = Path("/proc/driver/nvidia/gpus")
LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"
"""JAX's environment variable with the numbers of the GPUs that a process uses."""
ATTEMPT = "--- "
"""The prefix of the log line at which an attempt starts."""


@dataclass(frozen=True)
class Worker:
    """A process of the program.

    Args:
      log: the file of its output.
      cursor: the file with its position.
      stacks: the file of its Python stacks, which it writes when it receives `DUMP`.
      is_shown: whether it also prints to the terminal.
    """

    index: int
    process: subprocess.Popen[bytes]
    log: Path
    cursor: Path
    stacks: Path
    is_shown: bool = False

    @property
    def code(self) -> int | None:
        """The exit code that a shell would report; None while the process runs."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    @property
    def is_killed(self) -> bool:
        """Whether a signal ended the process. JAX aborts processes whose peer is gone, so SIGABRT does not count."""
        code = self.process.returncode
        return code is not None and code < 0 and code != -signal.SIGABRT

    @property
    def position(self) -> Position | None:
        return cursor.read(self.cursor)

    def send(self, number: int) -> None:
        if self.code is None:
            self.process.send_signal(number)


@dataclass(frozen=True)
class Ended:
    """The end of a program.

    Args:
      code: the exit code of the process that failed first; 0 if none failed, `HUNG` if none made progress.
      why: the process that failed and the reason, in several lines.
      num_lost: how many processes were killed by others, or no longer answered.
      is_asked: whether `each_poll` of `Group.run` ended it.
      signals: how many signals came to this process meanwhile.
    """

    code: int
    why: str = ""
    num_lost: int = 0
    is_asked: bool = False
    signals: int = 0


def never(workers: Sequence[Worker]) -> bool:
    return False


@dataclass(frozen=True)
class Group:
    """Several processes that run the same command.

    Each process appends to `logs/process-N.log`; the first also prints to the terminal. Signals go to all processes.
    When one fails, the others have `GRACE_S` to end. If this process ends in any way, all of them end at once.

    Args:
      command: a program that calls `meshpar.join`, and its arguments.
      logs: an existing folder.
      port: the port at which the first process listens; None for a free one.
      host: the address of the interface at which the first process listens.
      hang_s: seconds without a new step after which the program counts as hung; None to learn it, see `Pace`.
      is_quiet: whether the first process prints nothing to the terminal.
      num_gpus: GPUs of this machine that each process uses; 0 leaves it to JAX.
    """

    command: Sequence[str]
    num_processes: int
    logs: Path
    port: int | None = None
    hang_s: float | None = None
    host: str = LOOPBACK
    is_quiet: bool = False
    num_gpus: int = 0

    def run(self, each_poll: Callable[[Sequence[Worker]], bool] = never) -> Ended:
        """Runs the program until it ends.

        Args:
          each_poll: called every `POLL_S` with the processes; if it returns True, they save a checkpoint and end.
        """
        address = f"{self.host}:{self.port or free_port(self.host)}"
        shutil.rmtree(self._cursors, ignore_errors=True)  # an earlier attempt may have had more processes
        self._cursors.mkdir(exist_ok=True)
        with ExitStack() as stack:
            lifeline, held = os.pipe()
            stack.callback(os.close, held)
            signals = stack.enter_context(_signals())
            workers: list[Worker] = []
            stack.callback(_kill, workers)
            try:
                for index in range(self.num_processes):
                    place = Place("meshpar launch", self.num_processes, index, address)
                    workers.append(self._start(place, lifeline, stack))
            finally:
                os.close(lifeline)
            ended = self._wait(workers, signals, each_poll)
            return replace(ended, signals=len(signals))

    @property
    def _cursors(self) -> Path:
        return self.logs / cursor.CURSORS.name

    def _start(self, place: Place, lifeline: int, of_group: ExitStack) -> Worker:
        position = self._cursors / str(place.index)
        stacks = self._cursors / f"{place.index}.stacks"
        variables = {LIFELINE: str(lifeline), cursor.FILE: str(position), STACKS: str(stacks)}
        if self.num_gpus and LOCAL_DEVICES not in os.environ:
            first = place.index * self.num_gpus
            variables[LOCAL_DEVICES] = ",".join(map(str, range(first, first + self.num_gpus)))
        log = self.logs / f"process-{place.index}.log"
        with log.open("ab", buffering=0) as file, ExitStack() as stack:
            file.write(f"{ATTEMPT}{datetime.now(UTC).isoformat(timespec='seconds')}\n".encode())
            output = errors = file.fileno()
            is_shown = place.index == 0 and not self.is_quiet
            if is_shown:
                output, errors = of_group.enter_context(relayed(log))
                for end in {output, errors}:
                    stack.callback(os.close, end)
            process = subprocess.Popen(
                self.command,
                env=os.environ | place.variables() | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                pass_fds=(lifeline,),
                start_new_session=True,  # the terminal's Ctrl-C reaches only this process, which forwards it to all
            )
        return Worker(place.index, process, log, position, stacks, is_shown)

    def _wait(
        self, workers: Sequence[Worker], signals: list[int], each_poll: Callable[[Sequence[Worker]], bool]
    ) -> Ended:
        """Waits until all processes have ended, and ends the others when one fails."""
        num_sent = 0
        is_asked = False
        pace = Pace(self.hang_s)
        while any(worker.code is None for worker in workers):
            # After a signal to all, the first process may take longer than the others to write the checkpoint.
            if failed := _failed([worker for worker in workers if worker.code != INTERRUPTED]):
                return _killed_by_user(failed) if num_sent > 1 else _end_others(failed, workers)
            if not is_asked and each_poll(workers):
                is_asked = True
                _send(workers, signal.SIGTERM)
            if len(signals) > num_sent:
                # A second signal ends the processes at once, as it ends a single process.
                _send(workers, signal.SIGKILL if num_sent else signals[0])
                num_sent += 1
            positions = [worker.position for worker in workers]
            pace.look(positions, time.monotonic())
            if is_hung(positions, pace.limit_s):
                return _end_hung(workers, positions)
            time.sleep(POLL_S)
        failed = _failed(workers)
        if failed and num_sent > 1:
            return _killed_by_user(failed)
        return replace(_end_others(failed, workers), is_asked=is_asked and not signals) if failed else Ended(0)


def is_hung(positions: Sequence[Position | None], limit_s: float) -> bool:
    """Whether no process makes progress. If none trains, they may take long to compile, evaluate or save."""
    known = [position for position in positions if position]
    is_still = len(known) == len(positions) and all(position.age_s > limit_s for position in known)
    return is_still and any(position.phase == "trains" for position in known)


def count_gpus() -> int:
    """The NVIDIA GPUs that the processes may use."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in visible.split(",") if name])
    return len(list(GPUS.glob("*")))


def free_port(host: str = LOOPBACK) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _failed(workers: Sequence[Worker]) -> Worker | None:
    """The process that failed first. A killed process comes before its peers, which fail in the next collective."""
    failed = [worker for worker in workers if worker.code]
    return max(failed, key=lambda worker: worker.is_killed, default=None)


def _killed_by_user(failed: Worker) -> Ended:
    """The end of processes that a second signal to this process killed. It is no failure of theirs."""
    for_all = "a second signal came before the processes had ended, and killed them"
    return Ended(failed.code or 0, f"{for_all}: the steps since the last checkpoint are lost")


def _end_others(failed: Worker, workers: Sequence[Worker]) -> Ended:
    """Ends the peers of a failed process: they wait for it, or are ending after the same signal."""
    num_lost = sum(worker.is_killed for worker in workers)
    _send(workers, signal.SIGTERM)
    grace_s = min(GRACE_S, AFTER_KILL_S) if failed.is_killed else GRACE_S
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(worker.code is None for worker in workers):
        time.sleep(POLL_S)
    stayed = [worker for worker in workers if worker.code is None]
    _kill(stayed)
    lines = [f"process {failed.index} ended first, with exit code {failed.code}"]
    if stayed:
        lines[0] += f"; {_named(stayed)} did not end within {grace_s:.0f} s and got SIGKILL"
    if not failed.is_shown:
        of_attempt = failed.log.read_bytes().rpartition(ATTEMPT.encode())[2]
        quoted = without_noise(of_attempt).decode(errors="replace").splitlines()[1:][-QUOTED_LINES:]
        what = "the last lines of" if quoted else "it printed nothing to"
        lines += [f"{what} {failed.log}{':' if quoted else ''}", *(f"  | {line}" for line in quoted)]
    return Ended(failed.code or 0, "\n".join(lines), num_lost)


def _end_hung(workers: Sequence[Worker], positions: Sequence[Position | None]) -> Ended:
    """Ends processes that wait for each other; reports their positions, first of those that hang or lag behind."""
    _send(workers, DUMP)
    time.sleep(DUMP_S)
    _kill(workers)
    found = []
    for worker, position in zip(workers, positions, strict=True):
        answers = worker.stacks.exists() and worker.stacks.stat().st_size > 0
        step = position.step if position else 0
        found.append(
            (answers, step, f"  process {worker.index}: {position}{'' if answers else '; it does not answer'}")
        )
    lines = ["no process makes progress:", *(line for *_, line in sorted(found))]
    num_lost = sum(not answers for answers, *_ in found)
    return Ended(HUNG, "\n".join([*lines, f"their Python stacks are in {workers[0].stacks.parent}"]), num_lost)


def _send(workers: Sequence[Worker], number: int) -> None:
    for worker in workers:
        worker.send(number)


def _kill(workers: Sequence[Worker]) -> None:
    _send(workers, signal.SIGKILL)
    for worker in workers:
        worker.process.wait()


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Yields a list that receives the signals to this process, in order, inside the `with` block."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _named(workers: Sequence[Worker]) -> str:
    names = ", ".join(str(worker.index) for worker in workers)
    return f"process {names}" if len(workers) == 1 else f"processes {names}"
