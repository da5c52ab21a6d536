"""Places the arrays of a table on a mesh, and initializes them.

Shapes: n devices, P parts of the table, L rows of a part, H hot rows, W columns of the table, D columns on a device.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.errors import Problems, ShardingError
from meshpar.mesh.varying import varying
from meshpar.sharding.resolve import AnyMesh
from meshpar.tables.consistency import Pending
from meshpar.tables.hot import HotRows
from meshpar.tables.state import TableState, as_part
from meshpar.tables.table import Table

INIT_ROWS = 1 << 12
"""Rows that are initialized at once."""


def struct(table: Table, mesh: AnyMesh) -> TableState:
    """The state of a table as a tree of `ShapeDtypeStruct`, with shardings: see `TableState` for the shapes.

    Raises:
      ShardingError: the table does not fit the mesh.

    >>> mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    >>> items = Table(num_rows=1000, width=16, capacity=64, optim={"kind": "row_adagrad", "lr": 0.1})
    >>> state = struct(items, mesh)
    >>> state.rows.shape, state.optim["sum"].shape
    ((1, 1000, 16), (1, 1000))
    """
    problems = Problems()
    table.check(mesh, problems)
    problems.raise_any(ShardingError, "the table does not fit the mesh:")
    num = math.prod(mesh.shape[axis] for axis in table.axes)
    shards = table.shards(num)
    whole = PartitionSpec()
    by_part = PartitionSpec(table.axes)
    by_device = PartitionSpec(None, table.axes)
    matrix, vector = (PartitionSpec(None, None, table.axes), whole) if table.column_axes else (by_part, by_part)

    def place(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, spec: PartitionSpec) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))  # pyright: ignore

    def optim(num_rows: int, parts: tuple[int, ...], matrix: PartitionSpec, vector: PartitionSpec) -> dict[str, Any]:
        arrays = table.optim.init(num_rows, table.width, table.dtype)
        return {
            name: place((*parts, *x.shape), x.dtype, matrix if len(x.shape) == 2 else vector)
            for name, x in arrays.items()
        }

    pending = ()
    if bound := table.consistency.bound:
        grads = bound + 1, num * num, table.capacity, _local_width(table, num)
        pending = Pending(
            place(grads[:-1], jnp.int32, by_device),
            place(grads, table.dtype, by_device),
            place(grads[:2], jnp.int32, by_device),
        )
    hot = ()
    if table.hot:
        hot = HotRows(place((table.hot, table.width), table.dtype, whole), optim(table.hot, (), whole, whole))
    parts = (shards.num_parts,)
    rows = place((*parts, shards.rows_each, table.width), table.dtype, matrix)
    return TableState(rows, optim(shards.rows_each, parts, matrix, vector), pending, hot, place((), jnp.int32, whole))


def init(table: Table, key: jax.Array) -> TableState:
    """Initializes this device's shards of a table. Call it within a `shard_map` over `table.axes`.

    The first values of a row depend on the key and the row's id, and not on the layout.

    Returns:
      The local shards of `struct(table, mesh)`.

    Memory: the shards, and `INIT_ROWS` rows. Communication: none.
    """
    num = lax.axis_size(table.axes)
    width = _local_width(table, num)
    length = table.shards(num).rows_each
    optim = {
        name: x if table.column_axes and x.ndim == 1 else varying(x, table.axes)  # columns share the state of a row
        for name, x in _zeros(table.optim.init(length, width, table.dtype)).items()
    }
    return TableState(
        _first_rows(table, key)[None],
        as_part(optim),
        _nothing_pending(table, num),
        _first_hot_rows(table, key),
        jnp.int32(0),
    )


def _first_rows(table: Table, key: jax.Array) -> jax.Array:
    """[L, D]. It draws blocks of rows, because all random bits of a shard would need more memory than the shard."""
    num = lax.axis_size(table.axes)
    shards = table.shards(num)
    width = _local_width(table, num)
    own = lax.axis_index(table.axes)
    part = jnp.zeros_like(own) if table.column_axes else own
    first_column = own * width if table.column_axes else 0
    block = min(INIT_ROWS, shards.rows_each)

    def draw(row: jax.Array) -> jax.Array:
        values = _first_row(table, key, shards.ids(part, row[None])[0])
        return lax.dynamic_slice(values, [first_column], [width])

    def fill(i: jax.Array, rows: jax.Array) -> jax.Array:
        first = jnp.minimum(i * block, shards.rows_each - block)
        places = first + jnp.arange(block, dtype=jnp.int32)
        return lax.dynamic_update_slice(rows, jax.vmap(draw)(places), [first, jnp.zeros_like(first)])

    empty = varying(jnp.zeros((shards.rows_each, width), table.dtype), table.axes)
    return lax.fori_loop(0, -(-shards.rows_each // block), fill, empty)


def _first_row(table: Table, key: jax.Array, row_id: jax.Array) -> jax.Array:
    """[W], the first values of a row."""
    scale = table.width**-0.5 if table.init_scale is None else table.init_scale
    return jax.random.uniform(jax.random.fold_in(key, row_id), (table.width,), table.dtype, -scale, scale)


def _first_hot_rows(table: Table, key: jax.Array) -> HotRows | tuple[()]:
    if not table.hot:
        return ()
    rows = jax.vmap(lambda row_id: _first_row(table, key, row_id))(jnp.arange(table.hot, dtype=jnp.int32))
    return HotRows(rows, _zeros(table.optim.init(table.hot, table.width, table.dtype)))


def _nothing_pending(table: Table, num: int) -> Pending | tuple[()]:
    if not table.consistency.bound:
        return ()
    shape = table.consistency.bound + 1, num, table.capacity, _local_width(table, num)
    pending = Pending(
        jnp.zeros(shape[:-1], jnp.int32), jnp.zeros(shape, table.dtype), jnp.full(shape[:2], -1, jnp.int32)
    )
    return jax.tree.map(lambda x: varying(x, table.axes), pending)


def _local_width(table: Table, num_devices: int) -> int:
    """D, the columns on a device."""
    return table.width // num_devices if table.column_axes else table.width


def _zeros(structs: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    return {name: jnp.zeros(x.shape, x.dtype) for name, x in structs.items()}
