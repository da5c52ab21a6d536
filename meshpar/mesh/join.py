"""Joins the processes that a launcher started into one program, over JAX's coordination service."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import socket
import threading
from dataclasses import dataclass
from typing import NamedTuple

import jax

from meshpar.errors import MeshError
from meshpar.mesh import roll_call

COORDINATOR, NUM_PROCESSES, PROCESS = "MESHPAR_COORDINATOR", "MESHPAR_NUM_PROCESSES", "MESHPAR_PROCESS"
"""The environment variables in which `meshpar launch` passes a process its place."""
BIND = "MESHPAR_BIND"
"""The address of this host at which the first process listens; by default the coordinator's address."""
LIFELINE = "MESHPAR_LIFELINE"
"""The file descriptor of a pipe that stays open while `meshpar launch` lives."""

DUMP = signal.SIGUSR2
STACKS = "MESHPAR_STACKS"
"""The file to which a process writes the stacks of all threads when it receives `DUMP`."""

TIMEOUT_S = 120
"""How long a process waits for the others to start. Hosts of a cluster may start minutes apart."""
TIMEOUT = "MESHPAR_JOIN_TIMEOUT"
"""The environment variable that overrides `TIMEOUT_S`."""
HEARTBEAT_S = 30
SHUTDOWN_S = 15

LOOPBACK = "127.0.0.1"
NODES = "SLURM_STEP_NODELIST"
LAST_PORT, NUM_PORTS = 65535, 4096

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""The signals that end a run after its step. Slurm can send SIGUSR1 some time before it ends a job."""
INTERRUPTED = 75
"""The exit code of a run that such a signal ended: EX_TEMPFAIL of sysexits.h, on which schedulers restart a job."""


SLURM = "Slurm"


class _Launcher(NamedTuple):
    """A launcher other than `meshpar launch`.

    Args:
      counts: variables with the number of processes. The first is set only in processes that were started together.
      index: the variable with the index of this process; None if JAX cannot join them.
      alone: the command that starts a single process.
    """

    counts: tuple[str, ...]
    index: str | None
    alone: str


_LAUNCHERS = {
    SLURM: _Launcher(("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_PROCID", "srun -n1"),
    "Open MPI": _Launcher(("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_RANK", "mpirun -n 1"),
    "MPI": _Launcher(("PMI_SIZE",), None, "mpirun -n 1"),
}


@dataclass(frozen=True)
class Place:
    """The place of this process among the processes of a program.

    Args:
      launcher: the program that started the processes.
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
    """The place that a launcher gave this process; None if no launcher started several.

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
            coordinator = _slurm_coordinator() if name == SLURM else None
            return Place(name, _number(launcher.counts[0]), _number(launcher.index), coordinator)
    return None


def join() -> Place | None:
    """Joins this process with the others, if a launcher started several. Call it before JAX looks for its devices.

    Returns:
      The place of this process; None if it is alone.

    Raises:
      MeshError: processes did not connect within `TIMEOUT_S`, and the error names them; or the port is in use.

    >>> join() is None  # a single process
    True
    """
    _obey_launcher()
    mine = place()
    if mine is None or mine.num_processes == 1 or jax.distributed.is_initialized():
        return mine
    timeout_s = _number(TIMEOUT) if TIMEOUT in os.environ else TIMEOUT_S
    known = {}
    if mine.coordinator:
        listens_at = _listens_at(mine)
        if mine.index:
            roll_call.answer(mine.coordinator, mine.index, timeout_s)
        else:
            roll_call.listen(listens_at, mine.num_processes, timeout_s)
        known = {
            "coordinator_address": mine.coordinator,
            "num_processes": mine.num_processes,
            "process_id": mine.index,
            "coordinator_bind_address": listens_at,
        }
    try:
        jax.distributed.initialize(
            **known,
            initialization_timeout=timeout_s,
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
        )
    except (RuntimeError, ValueError) as error:
        where = f" at {mine.coordinator}" if mine.coordinator else ""
        who = f"process {mine.index} of {mine.num_processes}, started by {mine.launcher},"
        what = f"{who} could not join the others{where}"
        why = str(error).partition("\n")[0]
        raise MeshError(f"{what} within {timeout_s} s: {why}; their logs say whether they started") from None
    return mine


def is_on_one_host() -> bool:
    """Whether all processes are on this machine, because the first one listens at loopback."""
    mine = place()
    return mine is not None and str(mine.coordinator).startswith(f"{LOOPBACK}:")


def share(num_devices: int) -> int:
    """The number of simulated devices of this process, if all joined processes together have `num_devices`.

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
    """Refuses a process that is not joined with the others of its launcher: each would train alone, in one run_dir.

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
            why = "each would be a separate run in the same run_dir"
            others = "join them: `srun meshpar train`, or meshpar.join() before meshpar.fit"
            raise MeshError(f"{what}: {why}; start one ({launcher.alone}), or {others}")


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    if not text.isdecimal():
        raise MeshError(f"{variable}={text}: a number is expected, as `meshpar launch` sets it")
    return int(text)


def _slurm_coordinator() -> str | None:
    """The address at which the first task of a step of Slurm listens; None if JAX has to find it.

    The first task runs on the first host. A step on one host uses loopback. The port depends on the job, as JAX's does.
    """
    hosts = re.match(r"(?P<prefix>[^\[,]+)(\[(?P<first>\w+)[^\]]*\](?P<suffix>[^,]*))?", os.environ.get(NODES, ""))
    job = os.environ.get("SLURM_JOB_ID", "")
    if hosts is None or not job.isdecimal():
        return None
    host = "".join(part or "" for part in hosts.group("prefix", "first", "suffix"))
    if os.environ.get("SLURM_STEP_NUM_NODES") == "1":
        host = LOOPBACK
    return f"{host}:{LAST_PORT - int(job) % NUM_PORTS}"


def _listens_at(mine: Place) -> str:
    """The address at which the coordinator listens: its host's, or all addresses if the host's is unknown."""
    host, _, port = str(mine.coordinator).rpartition(":")
    if mine.launcher != SLURM or host == LOOPBACK:
        return f"{os.environ.get(BIND, host)}:{port}"
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = LOOPBACK
    # A host may resolve its own name to loopback, where other hosts cannot reach it.
    return f"0.0.0.0:{port}" if address.startswith("127.") else f"{address}:{port}"


def _obey_launcher() -> None:
    """Ends this process when the launcher ends, in whatever way; writes all stacks when the launcher sends `DUMP`."""
    if LIFELINE not in os.environ:
        return
    stacks = open(os.environ[STACKS], "w")  # noqa: SIM115 (open as long as the process)
    faulthandler.register(DUMP, file=stacks)
    pipe = int(os.environ.pop(LIFELINE))

    def watch() -> None:
        os.read(pipe, 1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
