"""Makes processes agree: an error on one is raised on all, and all get the number of the first."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshpar.config.flat import changed
from meshpar.errors import CheckpointError, DamagedError, MeshError, Problems, excerpt


def on_all(check: Callable[[], None]) -> None:
    """Runs a check, and raises on every process if it fails on one: the others would hang in the next collective.

    Raises:
      DamagedError, CheckpointError: the check's own error; on the other processes, an error that names the process.
    """
    found: CheckpointError | None = None
    try:
        check()
    except CheckpointError as error:
        found = error
    if are_several():
        kind = 0 if found is None else 2 if isinstance(found, DamagedError) else 1
        with jax.transfer_guard("allow"):
            kinds = multihost_utils.process_allgather(np.int32(kind))
        for process in np.flatnonzero(kinds)[:1]:
            error = DamagedError if kinds[process] == 2 else CheckpointError
            found = found or error(f"process {process} cannot continue; its own message says why")
    if found:
        raise found


def check_same(mine: Mapping[str, Any]) -> None:
    """Refuses processes that would not run the same program: their collectives would wait for each other for ever.

    Args:
      mine: JSON data that must be the same on all processes.

    Raises:
      MeshError: on every process; lists what differs from the first process's, and where.
    """
    if not are_several():
        return
    first, *others = map(json.loads, everyones(json.dumps(mine)))
    problems = Problems()
    for process, theirs in enumerate(others, 1):
        for key, (expected, found) in changed(first, theirs).items():
            what = f"{excerpt(str(found))} on process {process}, {excerpt(str(expected))} on process 0"
            problems.add(key, what, "start all processes with the same command, files and versions")
    problems.raise_any(MeshError, "the processes would not run the same program:")


def everyones(text: str) -> list[str]:
    """The texts of all processes, in their order. All processes call it."""
    if not are_several():
        return [text]
    encoded = np.frombuffer(text.encode(), np.uint8)
    with jax.transfer_guard("allow"):
        lengths = multihost_utils.process_allgather(np.int32(len(encoded)))
        padded = np.zeros(lengths.max(), np.uint8)
        padded[: len(encoded)] = encoded
        rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]


def of_first(number: int) -> int:
    """The number that the first process passes, on every process."""
    if not are_several():
        return number
    with jax.transfer_guard("allow"):
        return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def are_several() -> bool:
    """Whether there are other processes. A single process starts no backend here: devices can still be simulated."""
    return jax.distributed.is_initialized() and jax.process_count() > 1
