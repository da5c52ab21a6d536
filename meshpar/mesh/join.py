"""Joins the processes that a launcher started into one program, over JAX's coordination service."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import threading
from dataclasses import dataclass
from typing import NamedTuple

import jax

from meshpar.errors import MeshError

COORDINATOR, NUM_PROCESSES, PROCESS = "MESHPAR_COORDINATOR", "MESHPAR_NUM_PROCESSES", "MESHPAR_PROCESS"
"""The variables with which `meshpar launch` tells a process its place."""
LIFELINE = "MESHPAR_LIFELINE"
"""The file descriptor of a pipe that `meshpar launch` holds open as long as it lives."""

DUMP = signal.SIGUSR2
STACKS = "MESHPAR_STACKS"
"""The file to which a process writes all its stacks when it gets `DUMP`."""

TIMEOUT_S = 120
"""How long a process waits for the others to start. Hosts of a cluster may start minutes apart."""
HEARTBEAT_S = 30
SHUTDOWN_S = 15

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""The signals that end a run after its step. Slurm sends the last one, if asked, some time before it ends a job."""
INTERRUPTED = 75
"""The exit code of a run that such a signal ended: EX_TEMPFAIL of sysexits.h, on which schedulers restart a job."""


class _Launcher(NamedTuple):
    """A launcher of others.

    Args:
      counts: variables with the number of processes. The first is set only for those that run together.
      index: the variable with the index of this process; None if JAX cannot join them.
      alone: the command that starts a single process.
    """

    counts: tuple[str, ...]
    index: str | None
    alone: str


_LAUNCHERS = {
    "Slurm": _Launcher(("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_PROCID", "srun -n1"),
    "Open MPI": _Launcher(("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_RANK", "mpirun -n 1"),
    "MPI": _Launcher(("PMI_SIZE",), None, "mpirun -n 1"),
}


@dataclass(frozen=True)
class Place:
    """The place of this process among those of a program.

    Args:
      launcher: who started the processes.
      coordinator: host:port at which the first process listens; None if JAX finds it.
    """

    launcher: str
    num_processes: int
    index: int
    coordinator: str | None = None

    def variables(self) -> dict[str, str]:
        """The environment of a process at this place."""
        coordinator = self.coordinator or ""
        return {COORDINATOR: coordinator, NUM_PROCESSES: str(self.num_processes), PROCESS: str(self.index)}


def place() -> Place | None:
    """Where a launcher put this process; None if it is alone.

    Raises:
      MeshError: the variables contradict each other.
    """
    if COORDINATOR in os.environ:
        found = Place("meshpar launch", _number(NUM_PROCESSES), _number(PROCESS), os.environ[COORDINATOR])
        if not 0 <= found.index < found.num_processes:
            what = f"{PROCESS}={found.index}, of {NUM_PROCESSES}={found.num_processes} processes"
            raise MeshError(f"{what}: they are numbered from 0 to {found.num_processes - 1}")
        return found
    for name, launcher in _LAUNCHERS.items():
        if launcher.index and launcher.index in os.environ and launcher.counts[0] in os.environ:
            return Place(name, _number(launcher.counts[0]), _number(launcher.index))
    return None


def join() -> Place | None:
    """Joins this process with the others, if a launcher started several. Call it before JAX looks for its devices.

    Returns:
      The place of this process; None if it is alone.

    Raises:
      MeshError: the others did not come within `TIMEOUT_S`, or the port is in use.
    """
    _obey_launcher()
    mine = place()
    if mine is None or mine.num_processes == 1 or jax.distributed.is_initialized():
        return mine
    if mine.coordinator and mine.index == 0:
        _check_free(mine.coordinator)
    known = {}
    if mine.coordinator:
        known = {
            "coordinator_address": mine.coordinator,
            "num_processes": mine.num_processes,
            "process_id": mine.index,
            "coordinator_bind_address": mine.coordinator,
        }
    try:
        jax.distributed.initialize(
            **known,
            initialization_timeout=TIMEOUT_S,
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
        )
    except (RuntimeError, ValueError) as error:
        where = f" at {mine.coordinator}" if mine.coordinator else ""
        who = f"process {mine.index} of {mine.num_processes}, started by {mine.launcher},"
        what = f"{who} could not join the others{where}"
        why = str(error).partition("\n")[0]
        raise MeshError(f"{what} within {TIMEOUT_S} s: {why}; their logs say whether they started") from None
    return mine


def share(num_devices: int) -> int:
    """How many of so many simulated devices this process has: all of them, if it is not joined with others.

    Raises:
      MeshError: the processes cannot share them evenly.
    """
    mine = place() if jax.distributed.is_initialized() else None
    if mine is None:
        return num_devices
    if num_devices % mine.num_processes:
        what = f"{mine.num_processes} processes cannot share {num_devices} devices evenly"
        raise MeshError(f"{what}: choose a number of processes that divides {num_devices}")
    return num_devices // mine.num_processes


def check_joined() -> None:
    """Refuses processes that a launcher started but that are not joined: each would train alone, in the same run_dir.

    Raises:
      MeshError: there are several processes, and they were not joined.
    """
    if jax.distributed.is_initialized():
        return
    for name, launcher in _LAUNCHERS.items():
        variable = next((variable for variable in launcher.counts if variable in os.environ), "")
        count = os.environ.get(variable, "")
        if count.isdecimal() and int(count) > 1:
            what = f"{name} started {count} processes ({variable}={count}), and they are not joined"
            why = "each would be a run of its own in the same run_dir"
            others = "join them: `srun meshpar train`, or meshpar.join() before meshpar.fit"
            raise MeshError(f"{what}: {why}; start one ({launcher.alone}), or {others}")


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    if not text.isdecimal():
        raise MeshError(f"{variable}={text}: a number is expected, as `meshpar launch` sets it")
    return int(text)


def _check_free(address: str) -> None:
    """Raises MeshError if nothing can listen at an address: JAX would end the process with a C++ stack."""
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except (OSError, ValueError) as error:
            what = f"the first process cannot listen at {address}: {getattr(error, 'strerror', None) or error}"
            raise MeshError(f"{what}; choose another with --port") from None


def _obey_launcher() -> None:
    """Ends this process as soon as the launcher is gone, however it ended; writes all stacks when it sends `DUMP`."""
    if LIFELINE not in os.environ:
        return
    stacks = open(os.environ[STACKS], "w")  # noqa: SIM115 (open as long as the process)
    faulthandler.register(DUMP, file=stacks)
    pipe = int(os.environ.pop(LIFELINE))

    def watch() -> None:
        os.read(pipe, 1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
