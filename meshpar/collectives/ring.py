"""Rings that send chunks while the devices compute: two folds, each the transpose of the other.

    gather:          the chunks of all devices pass every device, which uses each of them
    reduce_scatter:  each sum passes all devices on its way to its owner, and every device adds a part

Each of n devices sends n-1 chunks: one way in n-1 rounds; both ways in n // 2 rounds of two chunks, because each side
brings the chunks of its nearer half. The messages of a round do not depend on its computation, so a round takes the
longer of the two times.

Source: Wang et al. 2023, "Overlap communication with dependent computation via decomposition", ASPLOS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives.permute import permute
from meshpar.errors import ShardingError
from meshpar.mesh.varying import Axes

UNROLLED = 8
"""The default of `Ring.unrolled`."""
Rank = jax.Array
Visit = Callable[[Any, jax.Array, Rank], Any]


class Lane(NamedTuple):
    """One direction of a ring: chunks move `shift` devices in each of `hops` hops."""

    shift: int
    hops: int


@dataclass(frozen=True)
class Ring:
    """The devices along mesh axes.

    Args:
      axes: manual mesh axes.
      both_ways: whether chunks travel in both directions at once.
      unrolled: the largest size at which rounds are unrolled; a larger ring scans them.

    Raises:
      ShardingError: an axis is not manual where the ring is used.
    """

    axes: Axes
    both_ways: bool = False
    unrolled: int = field(default_factory=lambda: UNROLLED)

    @property
    def size(self) -> int:
        """The number of devices."""
        try:
            return lax.axis_size(self.axes)
        except NameError:
            name = " x ".join(self.axes)
            raise ShardingError(f"a ring over {name}: not manual here; use it in a jax.shard_map over it") from None

    @property
    def lanes(self) -> list[Lane]:
        """The directions with at least one hop, the one with most hops first."""
        others = self.size - 1
        lanes = [Lane(1, self.size // 2), Lane(-1, others // 2)] if self.both_ways else [Lane(1, others)]
        return [lane for lane in lanes if lane.hops]

    @property
    def is_scanned(self) -> bool:
        return self.size > max(self.unrolled, 1)

    def rank(self, distance: int | jax.Array = 0) -> Rank:
        """The index of the device `distance` hops further; of this device by default."""
        return (lax.axis_index(self.axes) + distance) % self.size

    def send(self, chunks: Sequence[jax.Array], lanes: Sequence[Lane]) -> list[jax.Array]:
        """Moves each chunk one hop along its lane. Chunks beyond the number of lanes are not sent."""
        ranks = range(self.size)
        return [
            permute(chunk, self.axes, [(i, (i + lane.shift) % self.size) for i in ranks])
            for chunk, lane in zip(chunks, lanes, strict=False)
        ]


def gather(ring: Ring, own: jax.Array, visit: Visit) -> Any:
    """Folds `visit` over the chunks of all devices: this device's own, then the others as they arrive.

    Args:
      own: this device's chunk.
      visit: (carry, chunk, rank of the device that owns it) -> carry; the first carry is None.

    Communication: n-1 chunks, in n-1 rounds; both ways in n // 2.
    Memory: in each direction, the chunk in use and the chunk that arrives.
    """
    lanes = ring.lanes

    def turn(carry: Any, chunks: list[jax.Array], hop: int | jax.Array, onward: list[Lane]) -> tuple[Any, Any]:
        """Uses the chunks that have moved `hop` hops, while the lanes `onward` send their chunks one hop further."""
        coming = ring.send(chunks, onward)
        for chunk, lane in zip(chunks, lanes, strict=False):
            carry = visit(carry, chunk, ring.rank(-lane.shift * hop))
        return _in_step(carry, coming)

    coming = ring.send([own] * len(lanes), lanes)
    carry, chunks = _in_step(visit(None, own, ring.rank()), coming)
    hop = 1
    if ring.is_scanned:
        hop = lanes[-1].hops
        hops = jnp.arange(1, hop, dtype=jnp.int32)
        # Two turns in one iteration alternate between two buffers; a single one would have to be copied.
        (carry, chunks), _ = lax.scan(lambda at, hop: (turn(*at, hop, lanes), None), (carry, chunks), hops, unroll=2)
    for last in range(hop, lanes[0].hops + 1 if lanes else 0):
        carry, chunks = turn(carry, chunks, last, [lane for lane in lanes if lane.hops > last])
    return carry


def reduce_scatter(ring: Ring, make: Callable[[Rank], jax.Array]) -> jax.Array:
    """The sum of the parts that all devices compute for this device.

    Args:
      make: rank of a device -> this device's part of that device's sum.

    Communication: n-1 chunks, in n-1 rounds; both ways in n // 2.
    Memory: in each direction, the sum that is sent, the sum that arrives, and the part that is computed.
    Numerics: summed in the dtype of the parts, device by device.
    """
    lanes = ring.lanes

    def turn(sums: list[jax.Array], left: int | jax.Array, joined: list[Lane]) -> list[jax.Array]:
        """Computes parts of the sums that are `left` hops from their owners, while the sums arrive; new lanes start."""
        parts = [make(ring.rank(lane.shift * left)) for lane in joined]
        parts, coming = _in_step(parts, ring.send(sums, lanes))
        return [*map(jnp.add, parts, coming), *parts[len(coming) :]]

    sums: list[jax.Array] = []
    turns = range(lanes[0].hops, lanes[-1].hops - 1 if ring.is_scanned else 0, -1) if lanes else []
    for left in turns:
        sums = turn(sums, left, [lane for lane in lanes if lane.hops >= left])
    if ring.is_scanned:
        rest = jnp.arange(lanes[-1].hops - 1, 0, -1, dtype=jnp.int32)
        sums, _ = lax.scan(lambda sums, left: (turn(sums, left, lanes), None), sums, rest, unroll=2)
    coming = ring.send(sums, lanes)
    own, coming = _in_step(make(ring.rank()), coming)
    return reduce(jnp.add, coming, own)


def _in_step(computed: Any, coming: Any) -> tuple[Any, Any]:
    """A barrier between rounds: returns both values when both are ready.

    Without it, compilers send all chunks at once and hold them all, or fuse a sum into the product that should hide it.
    """
    return lax.optimization_barrier((computed, coming))
