"""An embedding table that is sharded over devices: pull requested rows, push their gradients.

Shapes: N ids of a device, n devices, P parts of the table, L rows of a part, C slots for each part, W columns of the
table, D columns on a device.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import pydantic
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from meshpar.config import Config, Positive, Section, Strings, default
from meshpar.errors import Problems, ShardingError
from meshpar.mesh.varying import Axes, varies_over, varying
from meshpar.sharding.resolve import AnyMesh
from meshpar.tables.consistency import AnyConsistency, Pending, Sync
from meshpar.tables.optim import Optimizer, State, read
from meshpar.tables.request import Counts, Slots, assign, sum_by_row
from meshpar.tables.shards import Partition, Shards

INIT_ROWS = 1 << 16
"""Rows that are initialized at once."""


class TableState(NamedTuple):
    """The arrays of a table; within a `shard_map`, the shards of this device.

    Args:
      rows: [P L, W].
      optim: the state of the optimizer.
      pending: pushes on their way; None under `sync`.
      step: int32[], the number of pushes.
    """

    rows: jax.Array
    optim: State
    pending: Pending | None
    step: jax.Array


class Pulled(NamedTuple):
    """The result of a pull.

    Args:
      rows: [*N, W], the row of each id; zeros for ids below 0, and for those without a slot.
      slots: the slot of each id.
      requests: int32 [n, C], the rows of this device's shard that each device requested; L for none.
    """

    rows: jax.Array
    slots: Slots
    requests: jax.Array

    @property
    def counts(self) -> Counts:
        return self.slots.counts


class Table(Config):
    """An embedding table of `num_rows` rows. Use `pull` and `push` within a `shard_map` over `axes`.

    Memory: a device holds a part of the rows and of the optimizer's state; 2 n C W numbers for messages; and under
    `stale` and `async` the last pushes, (bound + 1) n C (D + 1) numbers.
    """

    num_rows: Annotated[int, pydantic.Field(gt=0, le=1 << 30)]
    width: Positive
    """Columns: the size of an embedding."""
    axes: Strings = default(("data",))
    """Mesh axes over which the table is sharded. The batch must be sharded over the same axes."""
    partition: Partition = "range"
    """`range`: consecutive rows are together; `hash`: they are spread evenly; `column`: each device has some columns of
    all rows."""
    capacity: Positive
    """Slots for the unique ids that a device requests of another one in a step; under `column`, of all together."""
    optim: Section[Optimizer]
    consistency: Section[AnyConsistency] = default(Sync())
    """When gradients are applied: `sync`, `{kind: stale, steps: 2}`, `{kind: async, limit: 4, seed: 0}`."""
    dtype: Literal["float32", "float64"] = "float32"
    init_scale: Annotated[float, pydantic.Field(ge=0)] | None = None
    """First values are uniform in -init_scale to init_scale. Default: 1 / sqrt(width)."""

    # The layout ---------------------------------------------------------------------------------------------------

    def shards(self, num_devices: int) -> Shards:
        return Shards(self.partition, self.num_rows, num_devices)

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

    def struct(self, mesh: AnyMesh) -> TableState:
        """The state as a tree of `ShapeDtypeStruct`, with its shardings.

        Raises:
          ShardingError: the table does not fit the mesh.
        """
        problems = Problems()
        self.check(mesh, problems)
        problems.raise_any(ShardingError, "the table does not fit the mesh:")
        num = math.prod(mesh.shape[axis] for axis in self.axes)
        shards = self.shards(num)
        length = shards.num_parts * shards.rows_each
        by_column = self.partition == "column"
        matrix = PartitionSpec(None, self.axes) if by_column else PartitionSpec(self.axes)
        vector = PartitionSpec() if by_column else PartitionSpec(self.axes)
        of_sender = PartitionSpec(None, self.axes)

        def place(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, spec: PartitionSpec) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))  # pyright: ignore

        arrays = self.optim.init(length, self.width, self.dtype)
        optim: State = {
            name: place(x.shape, x.dtype, matrix if len(x.shape) == 2 else vector) for name, x in arrays.items()
        }
        pending = None
        if bound := self.consistency.bound:
            width = self.width // num if by_column else self.width
            grads = (bound + 1, num * num, self.capacity, width)
            pending = Pending(
                place(grads[:-1], jnp.int32, of_sender),
                place(grads, self.dtype, of_sender),
                place(grads[:2], jnp.int32, of_sender),
            )
        rows = place((length, self.width), self.dtype, matrix)
        return TableState(rows, optim, pending, place((), jnp.int32, PartitionSpec()))

    def needed(self, ids: Int[Array, "B *N"], num_devices: int) -> int:
        """The capacity that a batch of ids needs, if each device gets an equal part of its rows."""
        shards = self.shards(num_devices)
        count = jax.jit(jax.vmap(lambda part: assign(part, shards, 1).counts.needed))
        return int(count(jnp.asarray(ids, jnp.int32).reshape(num_devices, -1)).max())

    # Within a shard_map -------------------------------------------------------------------------------------------

    def init(self, key: jax.Array) -> TableState:
        """The first state of this device. A row depends on the key and its id, and not on the layout.

        Memory: the shards, and `INIT_ROWS` rows.
        """
        num = lax.axis_size(self.axes)
        shards = self.shards(num)
        own = lax.axis_index(self.axes)
        by_column = self.partition == "column"
        width = self.width // num if by_column else self.width
        scale = self.width**-0.5 if self.init_scale is None else self.init_scale
        part = jnp.zeros_like(own) if by_column else own

        def draw(row: jax.Array) -> jax.Array:
            ids = shards.ids(part, row[None])
            values = jax.random.uniform(jax.random.fold_in(key, ids[0]), (self.width,), self.dtype, -scale, scale)
            return lax.dynamic_slice(values, [own * width if by_column else 0], [width])

        rows = lax.map(draw, jnp.arange(shards.rows_each, dtype=jnp.int32), batch_size=INIT_ROWS)
        arrays = self.optim.init(shards.rows_each, width, self.dtype)
        return TableState(
            rows,
            {name: self._own(jnp.zeros(x.shape, x.dtype)) for name, x in arrays.items()},
            self._nothing_pending(num, width),
            jnp.int32(0),
        )

    def pull(self, state: TableState, ids: Int[Array, "*N"]) -> Pulled:
        """The rows of ids.

        Args:
          ids: int32, those of this device; below 0 for no row.

        Communication: `(n-1) C (4 + D b)` bytes for rows of D elements of b bytes.
        Raises:
          ShardingError: ids differ along an axis over which the table is not sharded.
        """
        if others := sorted(varies_over(ids) - set(self.axes)):
            what = f"ids differ along {', '.join(others)}, over which the table is not sharded"
            raise ShardingError(f"{what}: its copies would get different gradients; add the axis to table.axes")
        slots = assign(varying(ids, self.axes), self.shards(lax.axis_size(self.axes)), self.capacity)
        if self.partition == "column":
            requests = lax.all_gather(slots.rows[0], self.axes)
        else:
            requests = self._exchange(slots.rows)
        found = self._exchange(read(state.rows, requests))
        return Pulled(slots.read(self._joined(found)), slots, requests)

    def push(self, state: TableState, pulled: Pulled, grads: Float[Array, "*N W"]) -> TableState:
        """The state after the gradients of pulled rows arrived. Other rows and their state are not touched.

        Args:
          state: donate it to the program, which then makes no copy of the table.
          grads: of the loss of all devices by `pulled.rows`.

        Communication: `(n-1) C D b` bytes for rows of D elements of b bytes; and what the optimizer sends.
        """
        received = self._exchange(self._divided(pulled.slots.summed(grads)))
        none = len(state.rows)
        rows, grads, pending = self.consistency.arrive(state.pending, pulled.requests, received, state.step, none)
        rows, grads = sum_by_row(rows, grads, none)
        table, optim = self.optim.update(state.rows, state.optim, rows, grads, self._column_axes)
        return TableState(table, optim, pending, state.step + 1)

    @property
    def _column_axes(self) -> Axes:
        return self.axes if self.partition == "column" else ()

    def _exchange(self, x: jax.Array) -> jax.Array:
        """[n, ...] -> [n, ...]: sends the i-th part to device i."""
        return lax.all_to_all(x, self.axes, split_axis=0, concat_axis=0)

    def _joined(self, found_nCD: jax.Array) -> jax.Array:
        """[P C, W], the rows of all slots, from those that each device sent."""
        if self.partition == "column":
            found_nCD = found_nCD.swapaxes(0, 1)
        return found_nCD.reshape(-1, self.width)

    def _divided(self, rows_SW: jax.Array) -> jax.Array:
        """[n, C, D]: undoes `_joined`."""
        num = lax.axis_size(self.axes)
        if self.partition == "column":
            return rows_SW.reshape(self.capacity, num, -1).swapaxes(0, 1)
        return rows_SW.reshape(num, self.capacity, -1)

    def _own(self, x: jax.Array) -> jax.Array:
        """Types a part of the optimizer's first state: only what copies of a row share is invariant."""
        return x if self._column_axes and x.ndim == 1 else varying(x, self.axes)

    def _nothing_pending(self, num: int, width: int) -> Pending | None:
        if not self.consistency.bound:
            return None
        shape = (self.consistency.bound + 1, num, self.capacity, width)
        pending = Pending(
            jnp.zeros(shape[:-1], jnp.int32), jnp.zeros(shape, self.dtype), jnp.full(shape[:2], -1, jnp.int32)
        )
        return jax.tree.map(lambda x: varying(x, self.axes), pending)
