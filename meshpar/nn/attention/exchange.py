"""Exchanges of shards between the devices that share a row, around attention.

Shapes: B batch, S seq, T tokens of a group, H heads, h head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from meshpar.collectives.permute import permute
from meshpar.errors import ConfigError
from meshpar.mesh.varying import Axes
from meshpar.parallel.sequence import SEQ

HEADS = 2
"""The position of the heads in activations [batch, seq, heads, head_dim]."""


@dataclass(frozen=True)
class Exchange:
    """Neighbouring devices exchange tokens for heads: `x[B, S, H, h] -> x[B, group S, H / group, h]`, and back.

    Args:
      axes: the mesh axes over which rows are sharded, with `num_devices`.
      group: the number of neighbours that exchange; 1 for none.

    Communication: an all-to-all of q, k, v and the result, forward and backward; an all-gather of the segments.
    Source: Jacobs et al. 2023, arXiv:2309.14509 (Ulysses).
    """

    axes: Axes
    num_devices: int
    group: int

    def to_heads(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the tokens of the whole group, for some query heads and the key heads that these need."""
        if self.group == 1:
            return q, k, v
        if q.shape[HEADS] % self.group:
            what, fix = heads_and_group(q.shape[HEADS], self.group)
            raise ConfigError(f"parallel.context: {what}; {fix}")
        sent = sent_key_heads(q.shape[HEADS], k.shape[HEADS], self.group)
        if sent is not None:
            k = jnp.take(k, sent, axis=HEADS)
            v = jnp.take(v, sent, axis=HEADS)
        return self._all_to_all(q, HEADS, SEQ), self._all_to_all(k, HEADS, SEQ), self._all_to_all(v, HEADS, SEQ)

    def to_tokens(self, out: jax.Array) -> jax.Array:
        """Returns this device's tokens, for all heads."""
        return out if self.group == 1 else self._all_to_all(out, SEQ, HEADS)

    def whole(self, x: Int[Array, "B S"]) -> Int[Array, "B T"]:
        """The values of all tokens of the group."""
        if self.group == 1:
            return x
        return lax.all_gather(x, self.axes, axis=SEQ, tiled=True, axis_index_groups=self._groups)

    def _all_to_all(self, x: jax.Array, split: int, concat: int) -> jax.Array:
        return lax.all_to_all(x, self.axes, split, concat, tiled=True, axis_index_groups=self._groups)

    @property
    def _groups(self) -> list[list[int]] | None:
        if self.group == self.num_devices:
            return None
        return np.arange(self.num_devices).reshape(-1, self.group).tolist()


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


def sent_key_heads(heads: int, kv_heads: int, group: int) -> np.ndarray | None:
    """The key head to send at each place; None if each key head goes to exactly one device of a group.

    Each device gets one key head if all its query heads share it; else a key head for each of its query heads.

    >>> sent_key_heads(heads=8, kv_heads=4, group=4) is None
    True
    >>> sent_key_heads(heads=8, kv_heads=2, group=4).tolist()
    [0, 0, 1, 1]
    >>> sent_key_heads(heads=12, kv_heads=3, group=4).tolist()
    [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    """
    if kv_heads % group == 0:
        return None
    per_device = heads // group
    served = heads // kv_heads
    each = 1 if served % per_device == 0 else per_device
    return np.arange(group * each) * (per_device // each) // served


def heads_and_group(heads: int, group: int) -> tuple[str, str]:
    """What is wrong with this number of heads, and the nearest fix."""
    what = f"{heads} query heads on each device cannot be divided among the {group} devices that exchange them"
    fewer = math.gcd(heads, group)
    smaller = f"kind: hybrid, group: {fewer}" if fewer > 1 else "kind: ring"
    return what, f"parallel.context={{{smaller}}}, or a multiple of {group} heads"
