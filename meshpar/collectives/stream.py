"""Rings round which chunks travel while the devices compute: two folds, the transposes of each other.

    gather:          a chunk of each device comes by, and is used
    reduce_scatter:  a sum for each device comes by on its way there, and a part is added

Of n devices each sends n-1 chunks. One way that takes n-1 rounds; both ways n // 2, of two chunks each, since those
of the nearer half come from either side. What is sent in a round depends on nothing that is computed in it: a round
takes the longer of the two.

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

from meshpar.errors import ShardingError
from meshpar.mesh.varying import Axes

UNROLLED = 8
"""Devices of the largest ring whose rounds are written out, if it does not say otherwise."""
Rank = jax.Array
Visit = Callable[[Any, jax.Array, Rank], Any]


class Lane(NamedTuple):
    """One direction of a ring: chunks go `shift` devices a hop, `hops` times."""

    shift: int
    hops: int


@dataclass(frozen=True)
class Ring:
    """The devices along mesh axes.

    Args:
      axes: manual ones.
      both_ways: whether chunks travel in both directions at once.
      unrolled: up to so many devices its rounds are written out; beyond, they are scanned.

    Raises:
      ShardingError: an axis is not manual where the ring is used.
    """

    axes: Axes
    both_ways: bool = False
    unrolled: int = field(default_factory=lambda: UNROLLED)

    @property
    def size(self) -> int:
        """Its number of devices."""
        try:
            return lax.axis_size(self.axes)
        except NameError:
            name = " x ".join(self.axes)
            raise ShardingError(f"a ring over {name}: not manual here; use it in a jax.shard_map over it") from None

    @property
    def lanes(self) -> list[Lane]:
        """The directions in which anything is sent, that of most hops first."""
        others = self.size - 1
        lanes = [Lane(1, self.size // 2), Lane(-1, others // 2)] if self.both_ways else [Lane(1, others)]
        return [lane for lane in lanes if lane.hops]

    @property
    def is_scanned(self) -> bool:
        return self.size > max(self.unrolled, 1)

    def rank(self, distance: int | jax.Array = 0) -> Rank:
        """The index of this device, or of the one so many hops further."""
        return (lax.axis_index(self.axes) + distance) % self.size

    def send(self, chunks: Sequence[jax.Array], lanes: Sequence[Lane]) -> list[jax.Array]:
        """One hop: each chunk goes its lane. Of more chunks than lanes the rest stays."""
        return [self._hop(chunk, lane.shift) for chunk, lane in zip(chunks, lanes, strict=False)]

    def _hop(self, x: jax.Array, shift: int) -> jax.Array:
        return lax.ppermute(x, self.axes, [(i, (i + shift) % self.size) for i in range(self.size)])


def gather(ring: Ring, mine: jax.Array, visit: Visit) -> Any:
    """Folds `visit` over the chunks of all devices: this device's own, then the others' as they come.

    Args:
      mine: this device's chunk.
      visit: (carry, chunk, rank of the device whose chunk it is) -> carry; the carry is None at first.

    Communication: n-1 chunks, in n-1 rounds; both ways in n // 2.
    Memory: for each direction the chunk that is used, and one more, that comes.
    """
    lanes = ring.lanes

    def turn(carry: Any, chunks: list[jax.Array], hop: int | jax.Array, onward: list[Lane]) -> tuple[Any, Any]:
        """Uses the chunks that came `hop` hops, while those of the lanes that go on do so."""
        coming = ring.send(chunks, onward)
        for chunk, lane in zip(chunks, lanes, strict=False):
            carry = visit(carry, chunk, ring.rank(-lane.shift * hop))
        return _in_step(carry, coming)

    coming = ring.send([mine] * len(lanes), lanes)
    carry, chunks = _in_step(visit(None, mine, ring.rank()), coming)
    hop = 1
    if ring.is_scanned:
        hop = lanes[-1].hops
        body = lambda state, hop: (turn(state[0], state[1], hop, lanes), None)
        # Two turns in one iteration: two buffers take turns, where one would have to be copied.
        (carry, chunks), _ = lax.scan(body, (carry, chunks), jnp.arange(1, hop, dtype=jnp.int32), unroll=2)
    for last in range(hop, lanes[0].hops + 1 if lanes else 0):
        carry, chunks = turn(carry, chunks, last, [lane for lane in lanes if lane.hops > last])
    return carry


def reduce_scatter(ring: Ring, make: Callable[[Rank], jax.Array]) -> jax.Array:
    """The sum, over all devices, of what each makes for this one.

    Args:
      make: rank of a device -> this device's part of its sum.

    Communication: n-1 chunks, in n-1 rounds; both ways in n // 2.
    Memory: for each direction the sum that is sent, the one that comes, and the part that is made.
    Numerics: summed in the dtype of the parts, one device after the other.
    """
    lanes = ring.lanes

    def turn(sums: list[jax.Array], left: int | jax.Array, joined: list[Lane]) -> list[jax.Array]:
        """Makes parts of the sums that are then `left` hops from home, while these come; those of a new lane begin."""
        parts, coming = [make(ring.rank(lane.shift * left)) for lane in joined], ring.send(sums, lanes)
        parts, coming = _in_step(parts, coming)
        return [*map(jnp.add, parts, coming), *parts[len(coming) :]]

    sums: list[jax.Array] = []
    turns = range(lanes[0].hops, lanes[-1].hops - 1 if ring.is_scanned else 0, -1) if lanes else []
    for left in turns:
        sums = turn(sums, left, [lane for lane in lanes if lane.hops >= left])
    if ring.is_scanned:
        rest = jnp.arange(lanes[-1].hops - 1, 0, -1, dtype=jnp.int32)
        sums, _ = lax.scan(lambda sums, left: (turn(sums, left, lanes), None), sums, rest, unroll=2)
    coming = ring.send(sums, lanes)
    mine, coming = _in_step(make(ring.rank()), coming)
    return reduce(jnp.add, coming, mine)


def _in_step(computed: Any, coming: Any) -> tuple[Any, Any]:
    """Both, once both are there.

    Left alone, compilers send all chunks at once and hold them all; or fuse a sum into the product that is to hide it.
    """
    return lax.optimization_barrier((computed, coming))
