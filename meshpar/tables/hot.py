"""Hot rows: the first rows of a table, which are replicated on every device, so that popular rows need no slots.

Shapes: H hot rows, N ids of a device, W columns.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meshpar.mesh.varying import Axes
from meshpar.tables.optim import Optimizer, State


class HotRows(NamedTuple):
    """Rows and their state, the same on all devices.

    Args:
      rows: [H, W].
      optim: the state of the optimizer.
    """

    rows: jax.Array
    optim: State

    def push(self, ids: Int[Array, "*N"], grads: Float[Array, "*N W"], optimizer: Optimizer, axes: Axes) -> HotRows:
        """The rows after an update by the gradients of all devices.

        Args:
          ids: int32, the ids of this device; H for an id that is not a hot row.

        Communication: an all-reduce of H rows, and of H integers.
        """
        num, width = self.rows.shape
        flat = ids.reshape(-1)
        sums = jnp.zeros((num, width), grads.dtype).at[flat].add(grads.reshape(-1, width), mode="drop")
        count = jnp.zeros(num, jnp.int32).at[flat].add(1, mode="drop")
        sums, count = lax.psum((sums, count), axes)
        rows = jnp.arange(num, dtype=jnp.int32)
        return HotRows(*optimizer.update(self.rows, self.optim, jnp.where(count > 0, rows, num + rows), sums, ()))
