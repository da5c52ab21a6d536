"""Moves shards of consecutive tokens to the zigzag layout, in which all devices have the same work.

A model of the user's own has its tokens in order, because its positions and shifts do. So only attention has them in
the zigzag layout, see `parallel.sequence`.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives.permute import permute
from meshpar.mesh.varying import Axes
from meshpar.parallel.sequence import SEQ


@dataclass(frozen=True)
class Zigzag:
    """Exchanges halves of shards. Half c of a row of 2 n halves is on device min(c, 2 n - 1 - c).

    Args:
      axes: the mesh axes over which rows are sharded, with `num_devices`.

    Communication: each device sends its tokens once, if they are not its own already.
    """

    axes: Axes
    num_devices: int

    def arranged(self, x: jax.Array) -> jax.Array:
        """[B, S, ...] of consecutive tokens, in the zigzag layout."""
        front, back = jnp.split(x, 2, axis=SEQ)
        front = permute(front, self.axes, self._pairs(0))
        back = permute(back, self.axes, self._pairs(1))
        return jnp.concatenate(self._in_order(front, back), axis=SEQ)

    def restored(self, x: jax.Array) -> jax.Array:
        """The inverse of `arranged`."""
        front, back = self._in_order(*jnp.split(x, 2, axis=SEQ))
        front = permute(front, self.axes, [(to, source) for source, to in self._pairs(0)])
        back = permute(back, self.axes, [(to, source) for source, to in self._pairs(1)])
        return jnp.concatenate([front, back], axis=SEQ)

    def _pairs(self, half: int) -> list[tuple[int, int]]:
        """(device, the device that its front or back half goes to)."""
        halves = ((device, 2 * device + half) for device in range(self.num_devices))
        return [(device, min(c, 2 * self.num_devices - 1 - c)) for device, c in halves]

    def _in_order(self, front: jax.Array, back: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Swaps the halves on devices of odd number: their first half of the row was a back half."""
        is_odd = lax.axis_index(self.axes) % 2 == 1
        return jnp.where(is_odd, back, front), jnp.where(is_odd, front, back)
