"""Places the arrays of a table on a mesh, and initializes them.

Shapes: n devices, P parts of the table, L rows of a part, H hot rows, W columns of the table, D columns on a device.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.errors import Problems, ShardingError
from meshpar.mesh.varying import varying
from meshpar.sharding.resolve import AnyMesh
from meshpar.tables.consistency import Pending
from meshpar.tables.hot import HotRows
from meshpar.tables.state import TableState
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

    def placed(x: _Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, x.spec))  # pyright: ignore

    return jax.tree.map(placed, _arrays(table, num), is_leaf=_is_array)


class _Array(NamedTuple):
    """A global array of a table."""

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec


def _is_array(x: Any) -> bool:
    return isinstance(x, _Array)


def _arrays(table: Table, num: int) -> TableState:
    """The arrays of a table on `num` devices, each an `_Array`."""
    shards = table.shards(num)
    whole = PartitionSpec()
    by_part = PartitionSpec(table.axes)
    by_device = PartitionSpec(None, table.axes)
    matrix, vector = (PartitionSpec(None, None, table.axes), whole) if table.column_axes else (by_part, by_part)

    def array(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> Any:
        return _Array(shape, dtype, spec)

    def optim(num_rows: int, parts: tuple[int, ...], matrix: PartitionSpec, vector: PartitionSpec) -> dict[str, Any]:
        arrays = table.optim.init(num_rows, table.width, table.dtype)
        return {
            name: array((*parts, *x.shape), x.dtype, matrix if len(x.shape) == 2 else vector)
            for name, x in arrays.items()
        }

    pending = ()
    if bound := table.consistency.bound:
        width = table.width // num if table.column_axes else table.width
        pushes = bound + 1, num * num
        rows = array((*pushes, table.capacity), jnp.int32, by_device)
        grads = array((*pushes, table.capacity, width), table.dtype, by_device)
        pending = Pending(rows, grads, array(pushes, jnp.int32, by_device))
    hot = ()
    if table.hot:
        hot = HotRows(array((table.hot, table.width), table.dtype, whole), optim(table.hot, (), whole, whole))
    parts = (shards.num_parts,)
    rows = array((*parts, shards.rows_each, table.width), table.dtype, matrix)
    return TableState(rows, optim(shards.rows_each, parts, matrix, vector), pending, hot, array((), jnp.int32, whole))


def init(table: Table, key: jax.Array) -> TableState:
    """Initializes this device's shards of a table. Call it within a `shard_map` over `table.axes`.

    The first values of a row depend on the key and the row's id, and not on the layout.

    Returns:
      The local shards of `struct(table, mesh)`.

    Memory: the shards, and `INIT_ROWS` rows. Communication: none.
    """
    num = lax.axis_size(table.axes)

    def zeros(x: _Array) -> jax.Array:
        over = [*x.spec, *[None] * (len(x.shape) - len(x.spec))]
        shape = [size // num if axes else size for size, axes in zip(x.shape, over, strict=True)]
        return varying(jnp.zeros(shape, x.dtype), table.axes if any(x.spec) else ())

    state = jax.tree.map(zeros, _arrays(table, num), is_leaf=_is_array)
    pending, hot = state.pending, state.hot
    if isinstance(pending, Pending):
        pending = pending._replace(due=pending.due - 1)
    if isinstance(hot, HotRows):
        ids = jnp.arange(table.hot, dtype=jnp.int32)
        hot = hot._replace(rows=jax.vmap(lambda row_id: _first_row(table, key, row_id))(ids))
    return state._replace(rows=_first_rows(table, key, state.rows[0])[None], pending=pending, hot=hot)


def _first_rows(table: Table, key: jax.Array, empty: jax.Array) -> jax.Array:
    """[L, D]. It draws blocks of rows, because all random bits of a shard would need more memory than the shard.

    Args:
      empty: [L, D] of zeros.
    """
    shards = table.shards(lax.axis_size(table.axes))
    width = empty.shape[1]
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

    return lax.fori_loop(0, -(-shards.rows_each // block), fill, empty)


def _first_row(table: Table, key: jax.Array, row_id: jax.Array) -> jax.Array:
    """[W], the first values of a row."""
    scale = table.width**-0.5 if table.init_scale is None else table.init_scale
    return jax.random.uniform(jax.random.fold_in(key, row_id), (table.width,), table.dtype, -scale, scale)
