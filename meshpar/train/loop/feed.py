"""Batches on their devices: each process reads the rows that its own devices hold, and no others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

Structs = Mapping[str, jax.ShapeDtypeStruct]


def local_rows(structs: Structs) -> np.ndarray:
    """Which rows of a batch lie on devices of this process: int64[n], ascending.

    >>> whole = jax.ShapeDtypeStruct((4, 2), np.int32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    >>> local_rows({"tokens": whole}).tolist()
    [0, 1, 2, 3]
    """
    held = {_bounds(index, s) for s in structs.values() for index in _indices(s)}
    return np.array(sorted({row for bounds in held for row in range(*bounds)}), np.int64)


def put(batch: Mapping[str, np.ndarray], structs: Structs, rows: np.ndarray) -> dict[str, jax.Array]:
    """The global arrays of a batch, of which this process gives its part.

    Args:
      batch: the rows `rows` of each array; in them, all that is not the first dim.
      rows: `local_rows(structs)`.
    """
    with jax.transfer_guard_host_to_device("allow"):  # JAX takes what a callback gives for an oversight
        return {name: _global(array, structs[name], rows) for name, array in batch.items()}


def _global(array: np.ndarray, struct: jax.ShapeDtypeStruct, rows: np.ndarray) -> jax.Array:
    def part(index: Any) -> np.ndarray:
        start, stop = np.searchsorted(rows, _bounds(index, struct))
        return array[(slice(start, stop), *index[1:])]

    return jax.make_array_from_callback(struct.shape, struct.sharding, part)  # pyright: ignore


def _indices(struct: jax.ShapeDtypeStruct) -> Any:
    return struct.sharding.addressable_devices_indices_map(struct.shape).values()  # pyright: ignore


def _bounds(index: Any, struct: jax.ShapeDtypeStruct) -> tuple[int, int]:
    return index[0].indices(struct.shape[0])[:2]
