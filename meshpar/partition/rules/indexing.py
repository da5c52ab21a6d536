"""Gathers and scatters by index, also where the dim that is indexed is sharded.

A device looks up the indices that fall into its shard, and has zeros for the others, so that a lookup in a sharded dim
is a pending sum: an embedding whose vocabulary is sharded sends one sum of its results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode as Mode

from meshpar.mesh.varying import varying_alike
from meshpar.partition.rules.rule import Rule, bind, signed
from meshpar.partition.signature import Call, Signature


def gather(eqn: Any) -> Signature:
    operand, indices = (v.aval for v in eqn.invars)
    numbers = eqn.params["dimension_numbers"]
    sizes = eqn.params["slice_sizes"]
    looked_up = {d: ("index", d) for d in numbers.start_index_map if sizes[d] == 1}
    table = [looked_up.get(d) if d in numbers.start_index_map else ("window", d) for d in range(operand.ndim)]
    for d in range(operand.ndim):
        if d not in numbers.start_index_map and sizes[d] != operand.shape[d]:
            table[d] = None
    rows: list[Any] = [("row", i) for i in range(indices.ndim - 1)]
    for d, i in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        table[d] = rows[i]
    removed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    windows = iter(table[d] if d not in looked_up else None for d in range(operand.ndim) if d not in removed)
    others = iter(rows)
    ndim = eqn.outvars[0].aval.ndim
    out = tuple(next(windows) if d in numbers.offset_dims else next(others) for d in range(ndim))
    summed = tuple(looked_up.values())

    def compute(call: Call, x: jax.Array, index: jax.Array) -> list[jax.Array]:
        index = _wide(index)
        local_sizes = tuple(
            1 if size == 1 and (d in looked_up or d in removed) else (x.shape[d] if size == operand.shape[d] else size)
            for d, size in enumerate(sizes)
        )
        axes = {d: call.axes(label) for d, label in looked_up.items() if call.axes(label)}
        if not axes:
            return bind(eqn, x, index, slice_sizes=local_sizes)
        return [_lookup(eqn, operand, x, index, local_sizes, axes, numbers)]

    return Signature((tuple(table), (*rows, None)), (out,), compute, summed=summed)


def _wide(index: jax.Array) -> jax.Array:
    """An index that can hold each row of the table.

    Bytes of text are often uint8. In a table of more than 256 rows JAX's own gradient of such a lookup is zero.
    """
    return index.astype(jnp.int32) if index.dtype.itemsize < 4 else index


def _lookup(eqn: Any, operand: Any, x: Any, index: Any, sizes: Any, axes: dict[int, Any], numbers: Any) -> jax.Array:
    """This device's part of a lookup in dims that are sharded: dim -> its axes."""
    mode = eqn.params["mode"]
    limits = jnp.array(
        [operand.shape[d] - sizes[d] if d not in axes else operand.shape[d] - 1 for d in numbers.start_index_map],
        index.dtype,
    )
    if mode == Mode.CLIP:
        index = jnp.clip(index, jnp.zeros_like(limits), limits)
    is_inside = ((index >= 0) & (index <= limits)).all(-1)
    starts = [lax.axis_index(axes[d]) * x.shape[d] if d in axes else 0 for d in numbers.start_index_map]
    local = index - jnp.stack([jnp.asarray(start, index.dtype) for start in starts])
    columns = [i for i, d in enumerate(numbers.start_index_map) if d in axes]
    own = jnp.array([x.shape[d] for d in numbers.start_index_map], index.dtype)
    in_shard = ((local >= 0) & (local < own))[..., np.array(columns)].all(-1)
    x, local, in_shard, is_inside = varying_alike(x, local, in_shard, is_inside)
    found = bind(eqn, x, local, slice_sizes=sizes, mode=Mode.CLIP, fill_value=None)[0]

    def over_windows(flags: jax.Array) -> jax.Array:
        places = [d for d in range(found.ndim) if d not in numbers.offset_dims]
        return lax.broadcast_in_dim(flags, found.shape, places)

    result = jnp.where(over_windows(in_shard & is_inside), found, jnp.zeros_like(found))
    if mode != Mode.FILL_OR_DROP:
        return result
    # An index outside of the whole dim has the value that fills in; one device contributes it.
    fill = eqn.params["fill_value"]
    if fill is None:
        fill = (
            jnp.nan
            if jnp.issubdtype(found.dtype, jnp.inexact)
            else jnp.iinfo(found.dtype).min
            if jnp.issubdtype(found.dtype, jnp.signedinteger)
            else 0
        )
    every = tuple(axis for over in axes.values() for axis in over)
    is_first = lax.axis_index(every) == 0
    return jnp.where(over_windows(~is_inside) & is_first, jnp.full_like(found, fill), result)


def scatter(eqn: Any) -> Signature:
    """A scatter whose rows of updates are whole, as an update that overwrites needs; the windows may be sharded."""
    operand, table, index, updates, _ = _scattered(eqn)
    rows = {label for label in index if label is not None and not _is_batch(label, table)}
    index = tuple(None if label in rows else label for label in index)
    updates = tuple(None if label in rows else label for label in updates)
    table = tuple(None if isinstance(label, tuple) and label[0] == "index" else label for label in table)
    return Signature((table, index, updates), (table,), _local_scatter(eqn, operand, {}))


def scatter_add(eqn: Any) -> Signature:
    """A sum by index: rows of updates on different devices are partial sums, and each shard takes its own indices."""
    operand, table, index, updates, looked_up = _scattered(eqn)
    rows = tuple(label for label in index if label is not None and not _is_batch(label, table))
    return Signature((table, index, updates), (table,), _local_scatter(eqn, operand, looked_up, rows), summed=rows)


def _is_batch(label: Any, table: Sequence[Any]) -> bool:
    return label in table


def _scattered(eqn: Any) -> tuple[Any, Any, Any, Any, dict[int, Any]]:
    operand, indices, updates = (v.aval for v in eqn.invars)
    numbers = eqn.params["dimension_numbers"]
    removed = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = [d for d in range(operand.ndim) if d not in removed]
    window_sizes = {d: updates.shape[i] for d, i in zip(windows, numbers.update_window_dims, strict=True)}
    looked_up = {d: ("index", d) for d in numbers.scatter_dims_to_operand_dims if window_sizes.get(d, 1) == 1}
    # A window of the whole dim begins at 0, as that of a cache's heads, unless an index out of bounds drops it.
    stays = eqn.params["mode"] != Mode.FILL_OR_DROP
    table: list[Any] = [None] * operand.ndim
    for d in range(operand.ndim):
        if d in looked_up:
            table[d] = looked_up[d]
        elif window_sizes.get(d) == operand.shape[d] and (d not in numbers.scatter_dims_to_operand_dims or stays):
            table[d] = ("window", d)
    rows: list[Any] = [("row", i) for i in range(indices.ndim - 1)]
    for d, i in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        table[d] = rows[i]
    of_windows = iter(table[d] if d not in looked_up else None for d in windows)
    of_rows = iter(rows)
    update = tuple(next(of_windows) if i in numbers.update_window_dims else next(of_rows) for i in range(updates.ndim))
    return operand, tuple(table), (*rows, None), update, looked_up


def _local_scatter(eqn: Any, operand: Any, looked_up: dict[int, Any], rows: tuple[Any, ...] = ()) -> Any:
    numbers = eqn.params["dimension_numbers"]

    def compute(call: Call, x: jax.Array, index: jax.Array, updates: jax.Array) -> list[jax.Array]:
        index = _wide(index)
        shared = call.axes(*rows)
        if shared:  # the operand itself counts once in the sum
            x = jnp.where(lax.axis_index(shared) == 0, x, jnp.zeros_like(x))
        axes = {d: call.axes(label) for d, label in looked_up.items() if call.axes(label)}
        if not axes:
            return bind(eqn, x, index, updates)
        if eqn.params["mode"] == Mode.CLIP:
            limits = [operand.shape[d] - 1 for d in numbers.scatter_dims_to_operand_dims]
            index = jnp.clip(index, 0, jnp.array(limits, index.dtype))
        starts = [
            lax.axis_index(axes[d]) * x.shape[d] if d in axes else 0 for d in numbers.scatter_dims_to_operand_dims
        ]
        index = index - jnp.stack([jnp.asarray(start, index.dtype) for start in starts])
        return bind(eqn, x, index, updates, mode=Mode.FILL_OR_DROP)

    return compute


RULES: dict[str, Rule] = {
    "gather": signed(gather),
    "scatter": signed(scatter),
    **dict.fromkeys(("scatter_add", "scatter-add", "scatter-sub"), signed(scatter_add)),
    **dict.fromkeys(
        ("scatter_mul", "scatter-mul", "scatter_min", "scatter-min", "scatter_max", "scatter-max"), signed(scatter)
    ),
}
