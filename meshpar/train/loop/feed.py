"""Places batches on devices. Each process reads only the rows that its own devices hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from meshpar.train.batches import arranged

Structs = Mapping[str, jax.ShapeDtypeStruct]


def local_rows(structs: Structs) -> np.ndarray:
    """The rows of a batch that devices of this process hold: int64[n], ascending.

    >>> whole = jax.ShapeDtypeStruct((4, 2), np.int32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    >>> local_rows({"tokens": whole}).tolist()
    [0, 1, 2, 3]
    """
    rows: set[int] = set()
    for struct in structs.values():
        indices = struct.sharding.addressable_devices_indices_map(struct.shape).values()  # pyright: ignore
        for start, stop in {_bounds(index, struct) for index in indices}:
            rows.update(range(start, stop))
    return np.array(sorted(rows), np.int64)


def put(
    batch: Mapping[str, np.ndarray], structs: Structs, rows: np.ndarray, order: np.ndarray | None = None
) -> dict[str, jax.Array]:
    """Makes the global arrays of a batch from the part that this process has read.

    Args:
      batch: the rows `rows` of each array; every other dim is whole.
      rows: `local_rows(structs)`.
      order: see `Step.order`.
    """
    with jax.transfer_guard_host_to_device("allow"):  # the guard counts arrays from callbacks as implicit transfers
        return {name: _global_array(arranged(array, order), structs[name], rows) for name, array in batch.items()}


def _global_array(array: np.ndarray, struct: jax.ShapeDtypeStruct, rows: np.ndarray) -> jax.Array:
    def shard(index: Any) -> np.ndarray:
        start, stop = np.searchsorted(rows, _bounds(index, struct))
        return array[(slice(start, stop), *index[1:])]

    return jax.make_array_from_callback(struct.shape, struct.sharding, shard)  # pyright: ignore


def _bounds(index: Any, struct: jax.ShapeDtypeStruct) -> tuple[int, int]:
    """The first row of a shard, and the row after its last."""
    return index[0].indices(struct.shape[0])[:2]
