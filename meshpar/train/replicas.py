"""Finds silent corruption: a wrong computation or a lost bit makes one copy of replicated state differ from the others.

Arrays of which one device stores the only copy cannot be compared: a shard under ZeRO, or the optimizer's state in the
host's memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec

from meshpar.sharding.resolve import HOST
from meshpar.train.program import WHOLE, on_each_device
from meshpar.tree import flatten_with_paths

NAMED = 3
"""How many arrays of a device are named."""


def differences(state: Any) -> list[str]:
    """Compares the copies of all replicated arrays of a state. All processes call it.

    Returns:
      For each device whose copy differs, a line with its name and the arrays. With more than two copies, it is the
      device that differs from most others; with two, it is both.

    Communication: all-reduces of 8 bytes per array, and one of 4 bytes. Memory: arrays are read once, and not copied.
    """
    arrays = {path: x for path, x in flatten_with_paths(state).items() if copied_over(x.sharding)}
    if not arrays:
        return []
    num_different, checksums = comparison(tuple(x.sharding for x in arrays.values()))(list(arrays.values()))
    if not int(jax.device_get(num_different)):
        return []
    with jax.transfer_guard("allow"):
        rows = np.asarray(multihost_utils.process_allgather(checksums, tiled=True))
    different: dict[Any, list[str]] = defaultdict(list)
    for (path, x), row in zip(arrays.items(), rows.T, strict=True):
        for device in _minority(row, x.sharding):
            different[device].append(path)
    return [f"  {_name(device)}: {_listed(paths)}" for device, paths in different.items()]


def copied_over(sharding: Any) -> tuple[str, ...]:
    """The axes along which devices hold copies of an array."""
    if sharding.memory_kind == HOST:
        return ()
    used = {axis for entry in sharding.spec for axis in ((entry,) if isinstance(entry, str) else entry or ())}
    return tuple(axis for axis, size in sharding.mesh.shape.items() if size > 1 and axis not in used)


@cache
def comparison(shardings: tuple[Any, ...]) -> Any:
    """The program: arrays -> how many checksums differ, int32[]; and the checksums, uint32[devices, arrays]."""
    mesh = shardings[0].mesh
    axes = mesh.axis_names

    def local(shards: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        own = [checksum(x) for x in shards]
        groups: dict[tuple[str, ...], list[jax.Array]] = defaultdict(list)
        for sharding, number in zip(shardings, own, strict=True):
            groups[copied_over(sharding)].append(number)
        num_different = jnp.int32(0)
        for over, numbers in groups.items():
            sums = jnp.stack(numbers)
            # One message after the other: XLA:CPU would start independent messages in another order on each device.
            sums = jnp.where(num_different < 0, 0, sums)
            largest, complement = lax.pmax(jnp.stack([sums, ~sums]), over)
            num_different += jnp.sum(largest != ~complement, dtype=jnp.int32)
        return lax.psum(num_different, axes), jnp.stack(own)[None]

    in_specs = ([sharding.spec for sharding in shardings],)
    return jax.jit(on_each_device(local, mesh, in_specs, (WHOLE, PartitionSpec(axes))))


def _minority(checksums: np.ndarray, sharding: Any) -> list[Any]:
    """The devices whose checksum uint32[devices] differs from most copies; all devices if there is no majority."""
    placed = sharding.mesh.devices
    last = [sharding.mesh.axis_names.index(axis) for axis in copied_over(sharding)]
    order = [i for i in range(placed.ndim) if i not in last] + last
    num_copies = math.prod(placed.shape[i] for i in last)
    devices = placed.transpose(order).reshape(-1, num_copies)
    copies = checksums.reshape(placed.shape).transpose(order).reshape(-1, num_copies)
    found: list[Any] = []
    for group, values in zip(devices, copies, strict=True):
        kinds, counts = np.unique(values, return_counts=True)
        is_wrong = values != kinds[counts.argmax()]
        if len(kinds) > 1 and 2 * counts.max() <= num_copies:
            is_wrong[:] = True
        found += list(group[is_wrong])
    return found


def checksum(x: jax.Array) -> jax.Array:
    """uint32[], the sum of an array's bits as integers, each weighted by its position. Any flipped bit changes it.

    >>> int(checksum(jnp.array([1, 2], jnp.int32)))
    7
    """
    bits = _bits(x).reshape(-1)
    odd = 2 * lax.iota(jnp.uint32, bits.size) + 1
    return jnp.sum(bits * odd, dtype=jnp.uint32)


def _bits(x: jax.Array) -> jax.Array:
    """The bits as uint32[...]; an 8-byte number becomes two."""
    size = x.dtype.itemsize
    if x.dtype == jnp.bool_ or size < 4:
        narrow = x if x.dtype == jnp.bool_ else lax.bitcast_convert_type(x, jnp.uint8 if size == 1 else jnp.uint16)
        return narrow.astype(jnp.uint32)
    return lax.bitcast_convert_type(x, jnp.uint32)


def _name(device: Any) -> str:
    return f"device {device.id} ({device.device_kind}) of process {device.process_index}"


def _listed(paths: Sequence[str]) -> str:
    rest = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
    return ", ".join(paths[:NAMED]) + rest
