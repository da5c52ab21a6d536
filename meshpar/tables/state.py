"""The arrays of a table, and the result of a pull.

Shapes: N ids of a device, n devices, P parts of the table, L rows of a part, C slots for each part, W columns.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from meshpar.tables.consistency import Pending
from meshpar.tables.hot import HotRows
from meshpar.tables.optim import State
from meshpar.tables.request import Slots


class TableState(NamedTuple):
    """The arrays of a table; within a `shard_map`, the shards of this device.

    Args:
      rows: [P, L, W]. The dim of parts prevents that a checkpoint is restored on another number of devices, where rows
        have other places.
      optim: the state of the optimizer, [P, L, W] or [P, L].
      pending: pushes that have not arrived yet; empty under `sync`.
      hot: copies of the first rows, which replace those in `rows`; empty without hot rows.
      step: int32[], the number of pushes.
    """

    rows: jax.Array
    optim: State
    pending: Pending | tuple[()]
    hot: HotRows | tuple[()]
    step: jax.Array


class Pulled(NamedTuple):
    """The result of a pull.

    Args:
      rows: [*N, W], the row of each id; zeros for ids below 0, and for ids without a slot.
      slots: the slot of each id.
      requests: int32 [n, C], the rows of this device's shard that each device requested; L for none.
      hot: int32 [*N], the ids of hot rows; the number of hot rows for all other ids.
    """

    rows: jax.Array
    slots: Slots
    requests: jax.Array
    hot: jax.Array
