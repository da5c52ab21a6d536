"""Waits until all processes of a program have connected, and names the missing ones.

JAX's own wait ends in an abort with a C++ stack. It does not name the missing processes, and cannot be caught.
"""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, suppress

from meshpar.errors import MeshError

ANSWER_S = 5.0
"""How long a process that has connected may take to send its index."""
RETRY_S = 0.2
GREETING = "meshpar process "
COMPLETE = b"complete"
LONGEST = 2**16


def listen(address: str, num_processes: int, timeout_s: float) -> None:
    """Waits in the first process until all others have connected. The port is free again afterwards.

    Args:
      address: host:port of this host.

    Raises:
      MeshError: processes did not connect in time; or this process cannot listen at the address.
    """
    deadline = time.monotonic() + timeout_s
    with ExitStack() as stack:
        server = stack.enter_context(_server(address))
        came: dict[int, socket.socket] = {}
        while len(came) < num_processes - 1 and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            with suppress(OSError, ValueError):  # the time is over, or another program connected
                connection = stack.enter_context(server.accept()[0])
                connection.settimeout(ANSWER_S)
                came[int(_line(connection).removeprefix(GREETING))] = connection
        missing = [str(index) for index in range(1, num_processes) if index not in came]
        what = f"process {', '.join(missing)} of {num_processes} did not reach {address} within {timeout_s:.0f} s"
        for connection in came.values():
            with suppress(OSError):
                connection.sendall(what.encode() if missing else COMPLETE)
    if missing:
        raise MeshError(what)


def answer(address: str, index: int, timeout_s: float) -> None:
    """Connects to the first process, and waits until all processes have connected to it.

    Args:
      address: host:port of the first process.

    Raises:
      MeshError: the first process, or another one, did not connect in time.
    """
    deadline = time.monotonic() + timeout_s
    host, _, port = address.rpartition(":")
    why = ""
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
                connection.sendall(f"{GREETING}{index}\n".encode())
                heard = _line(connection).encode()
        except OSError as error:  # the first process has not started yet
            why = f": {error.strerror or error}"
            time.sleep(RETRY_S)
            continue
        if heard == COMPLETE:
            return
        raise MeshError(heard.decode(errors="replace") or f"process 0 at {address} ended before all had connected")
    raise MeshError(f"process 0 did not reach {address} within {timeout_s:.0f} s{why}")


def check_free(address: str) -> None:
    """Raises MeshError if this process cannot listen at an address."""
    _server(address).close()


def _server(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        return socket.create_server((host, int(port)))
    except (OSError, ValueError) as error:
        why = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise MeshError(
            f"the first process cannot listen at {address}: {why}; choose another with --port or --host"
        ) from None


def _line(connection: socket.socket) -> str:
    """The text that the other side sends, up to the end of the line or of the connection."""
    text = b""
    while len(text) < LONGEST and not text.endswith(b"\n") and (more := connection.recv(LONGEST)):
        text += more
    return text.decode().rstrip("\n")
