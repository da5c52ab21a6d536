"""Agreement between processes: each raises if one does, and a number is the same everywhere."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshpar.errors import CheckpointError, DamagedError


def on_all(check: Callable[[], None]) -> None:
    """Runs a check, and raises on every process if it fails on one: the others would hang in the next collective.

    Raises:
      DamagedError, CheckpointError: the check's own; on the other processes, which process raised it.
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
            found = found or error(f"process {process} cannot go on; its own message says why")
    if found:
        raise found


def of_first(number: int) -> int:
    """The number that the first process passes, on every process."""
    if not are_several():
        return number
    with jax.transfer_guard("allow"):
        return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def are_several() -> bool:
    """Whether there are other processes. A single process starts no backend here: devices can still be simulated."""
    return jax.distributed.is_initialized() and jax.process_count() > 1
