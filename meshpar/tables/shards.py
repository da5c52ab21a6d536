"""Maps the ids of a table's rows to devices, and to places on them."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

Partition = Literal["range", "hash", "column"]


class TableShards(NamedTuple):
    """The shards of a table on n devices.

    - `range`: the i-th device has the i-th part of the rows.
    - `hash`: of each n neighbouring rows, every device has one; a hash of their group determines which.
    - `column`: every device has all rows, and the i-th part of their columns.

    Args:
      partition: one of these.
      num_rows: of the whole table.
      num_devices: n.
    """

    partition: Partition
    num_rows: int
    num_devices: int

    @property
    def num_parts(self) -> int:
        """The number of devices among which the rows are divided; 1 if the columns are divided instead."""
        return 1 if self.partition == "column" else self.num_devices

    @property
    def rows_each(self) -> int:
        """The rows on each device. The last ones may be unused."""
        return -(-self.num_rows // self.num_parts)

    def locate(self, ids: Int[Array, "*N"]) -> tuple[Int[Array, "*N"], Int[Array, "*N"]]:
        """The part that stores the row of each id, and the row's index there. Each id must have a row.

        >>> part, row = TableShards("hash", 8, 4).locate(jnp.arange(8, dtype=jnp.int32))
        >>> part.tolist(), row.tolist()
        ([0, 1, 2, 3, 3, 0, 1, 2], [0, 0, 0, 0, 1, 1, 1, 1])
        """
        if self.partition == "hash":
            group = ids // self.num_parts
            return (ids % self.num_parts + self._rotation(group)) % self.num_parts, group
        return ids // self.rows_each, ids % self.rows_each

    def ids(self, part: jax.Array, rows: Int[Array, "N"]) -> Int[Array, "N"]:
        """The ids of rows of a part: undoes `locate`."""
        if self.partition == "hash":
            return rows * self.num_parts + (part - self._rotation(rows)) % self.num_parts
        return part * self.rows_each + rows

    def _rotation(self, group: Int[Array, "*N"]) -> Int[Array, "*N"]:
        """A hash of each group, 0 to num_parts - 1.

        Source: the last step of MurmurHash3 (Appleby), a bijection of 32 bits.
        """
        x = group.astype(jnp.uint32)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x = (x ^ (x >> shift)) * jnp.uint32(factor)
        return ((x ^ (x >> 16)) % self.num_parts).astype(jnp.int32)
