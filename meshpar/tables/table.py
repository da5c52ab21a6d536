"""An embedding table that is sharded over devices: pull requested rows, push their gradients.

Shapes: N ids of a device, n devices, P parts of the table, L rows of a part, C slots for each part, W columns of the
table, D columns on a device.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from jax import lax
from jaxtyping import Array, Float, Int

from meshpar.config import Config, Count, Positive, Section, Strings, default
from meshpar.errors import Problems, ShardingError
from meshpar.mesh.varying import Axes, varies_over, varying
from meshpar.sharding.resolve import AnyMesh
from meshpar.tables.consistency import AnyConsistency, Sync
from meshpar.tables.hot import HotRows
from meshpar.tables.optim import Optimizer, read
from meshpar.tables.request import assign, sum_by_row
from meshpar.tables.shards import Partition, TableShards
from meshpar.tables.state import Pulled, TableState


class Table(Config):
    """An embedding table of `num_rows` rows. Use `pull` and `push` within a `shard_map` over `axes`.

    Memory: a device holds a part of the rows and of the optimizer's state; 2 n C W numbers for messages; and under
    `stale` and `async` the last pushes, (bound + 1) n C (D + 1) numbers.
    """

    num_rows: Annotated[int, pydantic.Field(gt=0, le=1 << 30)]
    """Number of rows. Ids are from 0 to num_rows - 1."""
    width: Positive
    """Columns: the size of an embedding."""
    axes: Strings = default(("data",))
    """Mesh axes over which the table is sharded. The batch must be sharded over the same axes."""
    partition: Partition = "range"
    """`range`: consecutive rows are together; `hash`: they are spread evenly; `column`: each device has some columns of
    all rows."""
    capacity: Positive
    """Slots for the unique ids that a device requests from another device in a step; under `column`, for all ids."""
    hot: Count = 0
    """Number of first rows that are replicated on every device. They need no slots; their gradients are all-reduced."""
    optim: Section[Optimizer]
    consistency: Section[AnyConsistency] = default(Sync())
    """When gradients are applied: `sync`, `{kind: stale, steps: 2}`, `{kind: async, limit: 4, seed: 0}`."""
    dtype: Literal["float32", "float64"] = "float32"
    """Dtype of the rows, and of the floats of the optimizer's state."""
    init_scale: Annotated[float, pydantic.Field(ge=0)] | None = None
    """The first values are uniform between -init_scale and init_scale. Default: 1 / sqrt(width)."""

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Table:
        if self.hot > self.num_rows:
            raise ValueError(f"hot={self.hot}: there are {self.num_rows} rows")
        if self.hot and self.consistency.bound:
            raise ValueError("hot: gradients of hot rows are all-reduced, and never late; set consistency=sync")
        return self

    # The layout ---------------------------------------------------------------------------------------------------

    def shards(self, num_devices: int) -> TableShards:
        """How the rows are divided among `num_devices` devices."""
        return TableShards(self.partition, self.num_rows, num_devices)

    def check(self, mesh: AnyMesh, problems: Problems, name: str = "table") -> None:
        """Adds a problem for an axis that the mesh does not have, and for columns that cannot be divided."""
        unknown = [axis for axis in self.axes if axis not in mesh.shape]
        if unknown:
            what = f"the mesh has no {', '.join(unknown)}"
            problems.add(f"{name}.axes", what, f"its axes are {', '.join(mesh.axis_names)}")
            return
        num = math.prod(mesh.shape[axis] for axis in self.axes)
        if self.partition == "column" and self.width % num:
            what = f"{self.width} columns cannot be divided among {num} devices"
            problems.add(f"{name}.width", what, f"width={-(-self.width // num) * num}, or partition=hash")

    def needed(self, ids: Int[Array, "B *N"], num_devices: int) -> int:
        """The capacity that a batch of ids needs, if each device gets an equal part of its rows."""
        parts, _ = self.shards(num_devices).locate(jnp.asarray(ids, jnp.int32).reshape(num_devices, -1))
        found = []
        for own, part in zip(np.asarray(ids).reshape(num_devices, -1), np.asarray(parts), strict=True):
            _, first = np.unique(own, return_index=True)
            found.append(np.bincount(part[first[own[first] >= self.hot]]).max(initial=0))
        return max(1, *map(int, found))

    # Within a shard_map -------------------------------------------------------------------------------------------

    def pull(self, state: TableState, ids: Int[Array, "*N"]) -> Pulled:
        """Reads the rows of this device's ids from the devices that store them.

        Args:
          ids: integers; below 0 for no row.

        Communication: `(n-1) C (4 + D b)` bytes for rows of D elements of b bytes.
        Raises:
          ShardingError: ids differ along an axis over which the table is not sharded.
        """
        if others := sorted(varies_over(ids) - set(self.axes)):
            what = f"ids differ along {', '.join(others)}, over which the table is not sharded"
            raise ShardingError(f"{what}: its copies would get different gradients; add the axis to table.axes")
        ids = varying(ids.astype(jnp.int32), self.axes)
        is_hot = (ids >= 0) & (ids < self.hot)
        slots = assign(jnp.where(is_hot, -1, ids), self.shards(lax.axis_size(self.axes)), self.capacity)
        if self.partition == "column":
            requests = lax.all_gather(slots.rows[0], self.axes)
        else:
            requests = self._exchange(slots.rows)
        found = self._exchange(read(state.rows[0], requests))
        rows = slots.read(self._joined(found))
        if isinstance(state.hot, HotRows):
            rows = jnp.where(is_hot[..., None], read(state.hot.rows, ids), rows)
        return Pulled(rows, slots, requests, jnp.where(is_hot, ids, self.hot))

    def push(self, state: TableState, pulled: Pulled, grads: Float[Array, "*N W"]) -> TableState:
        """Sends the gradients of pulled rows to the devices that store the rows, and updates these rows.

        Args:
          state: donate it to the program, which then makes no copy of the table.
          grads: the gradients of the loss over all devices with respect to `pulled.rows`.

        Returns:
          The next state. Other rows and their optimizer state are unchanged.

        Communication: `(n-1) C D b` bytes for rows of D elements of b bytes; that of the optimizer; and for H hot rows
          `2 (n-1)/n H (W b + 4)`.
        """
        hot = state.hot
        if isinstance(hot, HotRows):
            hot = hot.push(pulled.hot, grads, self.optim, self.axes)
        received = self._exchange(self._divided(pulled.slots.summed(grads)))
        none = state.rows.shape[1]
        rows, grads, pending = self.consistency.arrive(state.pending, pulled.requests, received, state.step, none)
        rows, grads = sum_by_row(rows, grads, none)
        own = {name: x[0] for name, x in state.optim.items()}
        table, optim = self.optim.update(state.rows[0], own, rows, grads, self.column_axes)
        optim = {name: x[None] for name, x in optim.items()}
        return TableState(table[None], optim, pending, hot, state.step + 1)

    @property
    def column_axes(self) -> Axes:
        """The axes over which columns are sharded."""
        return self.axes if self.partition == "column" else ()

    def _exchange(self, x: jax.Array) -> jax.Array:
        """[n, ...] -> [n, ...]: sends the i-th part to device i."""
        return lax.all_to_all(x, self.axes, split_axis=0, concat_axis=0)

    def _joined(self, found_nCD: jax.Array) -> jax.Array:
        """[P C, W], the rows of all slots, from the rows that each device sent."""
        if self.partition == "column":
            found_nCD = found_nCD.swapaxes(0, 1)
        return found_nCD.reshape(-1, self.width)

    def _divided(self, rows_SW: jax.Array) -> jax.Array:
        """[n, C, D]: undoes `_joined`."""
        num = lax.axis_size(self.axes)
        if self.partition == "column":
            return rows_SW.reshape(self.capacity, num, -1).swapaxes(0, 1)
        return rows_SW.reshape(num, self.capacity, -1)
