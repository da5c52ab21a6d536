"""Removes duplicate ids, and gives each unique id a slot in a message of static size.

Shapes: N ids of a device, n devices, P parts of the table, C slots for each part, D columns of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshpar.tables.shards import TableShards


class Counts(NamedTuple):
    """How many rows a device requested in a step, each int32[1].

    Args:
      needed: the capacity that would have been enough.
      overflow: unique ids that got no slot. Their rows are zeros, and their gradients are lost.
      unknown: ids beyond the last row. Their rows are zeros.
    """

    needed: jax.Array
    overflow: jax.Array
    unknown: jax.Array


class Slots(NamedTuple):
    """The slots of a device's ids.

    Args:
      rows: int32 [P, C], the row that each slot requests; `rows_each` for an empty slot.
      places: int32 [*N], the slot of each id, counted over [P, C]; P C for an id without a slot.
    """

    rows: jax.Array
    places: jax.Array
    counts: Counts

    def read(self, rows_SD: Float[Array, "S D"]) -> Float[Array, "*N D"]:
        """The row of each id, from the rows of the slots; zeros for ids without a slot."""
        return rows_SD.at[self.places].get(mode="fill", fill_value=0)

    def summed(self, grads: Float[Array, "*N D"]) -> Float[Array, "S D"]:
        """The sum of the gradients of each slot's ids."""
        empty = jnp.zeros((self.rows.size, grads.shape[-1]), grads.dtype)
        return empty.at[self.places.reshape(-1)].add(grads.reshape(-1, grads.shape[-1]), mode="drop")


def assign(ids: Int[Array, "*N"], shards: TableShards, capacity: int) -> Slots:
    """Gives each unique id a slot for the part that stores its row. Ids below 0 get none.

    Args:
      ids: int32.
      capacity: C, the slots for each part. If a part has more ids, those of its last rows get no slot.
    """
    flat = ids.reshape(-1)
    none = shards.num_parts * shards.rows_each
    part, row = shards.locate(flat)
    is_row = (flat >= 0) & (flat < shards.num_rows)
    keys = jnp.where(is_row, part * shards.rows_each + row, none)
    order = jnp.argsort(keys)
    keys = keys[order]
    is_first = (keys != jnp.roll(keys, 1)).at[0].set(True) & (keys < none)
    part = keys // shards.rows_each
    num = jnp.zeros(shards.num_parts, jnp.int32).at[part].add(is_first.astype(jnp.int32), mode="drop")
    before = jnp.cumsum(num, dtype=jnp.int32) - num
    slot = jnp.cumsum(is_first, dtype=jnp.int32) - 1 - before.at[part].get(mode="clip")
    place = jnp.where((keys < none) & (slot < capacity), part * capacity + slot, shards.num_parts * capacity)
    rows = jnp.full(shards.num_parts * capacity, shards.rows_each, jnp.int32)
    rows = rows.at[place].set(keys % shards.rows_each, mode="drop")
    counts = Counts(
        needed=num.max(keepdims=True),
        overflow=jnp.maximum(num - capacity, 0).sum(keepdims=True, dtype=jnp.int32),
        unknown=(flat >= shards.num_rows).sum(keepdims=True, dtype=jnp.int32),
    )
    places = jnp.zeros_like(place).at[order].set(place, unique_indices=True)
    return Slots(rows.reshape(shards.num_parts, capacity), places.reshape(ids.shape), counts)


def sum_by_row(
    rows_M: Int[Array, "M"], grads_MD: Float[Array, "M D"], none: int
) -> tuple[Int[Array, "M"], Float[Array, "M D"]]:
    """The unique rows, and the sum of the gradients of each.

    Args:
      rows_M: int32; `none` or more where there is no row.

    Returns:
      The rows, each once. Indices from `none` on stand for no row, and have gradients of zero.
    """
    order = jnp.argsort(rows_M)
    rows_M = rows_M[order]
    is_first = (rows_M != jnp.roll(rows_M, 1)).at[0].set(True)
    index = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    is_row = rows_M < none
    unused = none + jnp.arange(len(rows_M), dtype=jnp.int32)
    unique = unused.at[jnp.where(is_row, index, len(rows_M))].set(rows_M, mode="drop")
    sums = jnp.zeros_like(grads_MD).at[index].add(jnp.where(is_row[:, None], grads_MD[order], 0))
    return unique, sums
