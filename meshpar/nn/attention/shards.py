"""Attention in blocks over rows whose tokens are on one device, or sharded over several.

Each device has the queries of its shard, and meets the keys of one shard after the other, beginning with its own. At
hop h it meets the shard that is h before its own: they travel round a ring, or every device has gathered all of them.
Which pairs of blocks it computes at a hop depends on the chunks that the two shards hold; the tables of all hops and
devices are NumPy arrays, few of them different.

Source: Liu et al. 2023, arXiv:2310.01889 (ring attention).

Shapes: B batch, K kv_heads, G query heads for each of them, S tokens of a shard, h head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from meshpar.collectives.permute import permute
from meshpar.cost.flops import needed
from meshpar.mesh.varying import Axes
from meshpar.nn.attention.block_pairs import BlockGrid, visible_pairs
from meshpar.nn.attention.core import needed_scores
from meshpar.nn.attention.online_softmax import Tokens, add_gradients, backward_of, empty, extend
from meshpar.parallel.local import varying_like
from meshpar.parallel.sequence import SequenceLayout

Visit = Callable[[Any, Sequence[int], Any, Any], tuple[Any, Any]]
"""(hop, the hops of the same loop, carry, a shard's keys) -> (carry, what is added for that shard)."""


@dataclass(frozen=True)
class Shards:
    """The shards of a row, and which pairs of blocks each device computes.

    Args:
      layout: which tokens each shard holds.
      grid: the blocks of a chunk.
      window: how many tokens a query attends to, if all layers agree; else None.
      axes: the mesh axes over which the row is sharded.
      group: the number of neighbouring devices that hold the same shard.
      gathers: whether each device gathers the keys of all shards; else they travel round a ring.
    """

    layout: SequenceLayout
    grid: BlockGrid
    window: int | None = None
    axes: Axes = ()
    group: int = 1
    gathers: bool = False

    @cached_property
    def _tables(self) -> tuple[list[np.ndarray], np.ndarray]:
        """The different tables, and int[hop, shard]: which of them a shard needs at a hop."""
        chunks = self.layout.chunks
        num_shards, chunks_each = chunks.shape
        shard = np.arange(num_shards)
        met = chunks[(shard - shard[:, None]) % num_shards]
        apart = chunks[None, :, :, None] - met[:, :, None, :]
        # Beyond `far` chunks, all distances are alike.
        far = 1 if self.window is None else -(-(self.window - 1) // self.grid.seq_len) + 1
        alike = np.clip(apart, -1, far).reshape(-1, chunks_each**2)
        different, which = np.unique(alike, axis=0, return_inverse=True)
        return [self._table(one.reshape(chunks_each, -1)) for one in different], which.reshape(num_shards, num_shards)

    def _table(self, apart: np.ndarray) -> np.ndarray:
        """The rows for chunks of queries and chunks of keys that are so many chunks apart."""
        seen = [(q, k) for q, k in np.ndindex(*apart.shape) if apart[q, k] >= 0]
        rows = [
            self.grid.rows(visible_pairs(self.grid, int(apart[q, k]), self.window), (q, k))
            for q, k in sorted(seen, key=lambda pair: apart[pair] > 0)  # a query's own key is in its first pair
        ]
        return np.concatenate([np.empty((0, 4), np.int32), *rows])

    @cached_property
    def hops(self) -> list[int]:
        """The hops, after the one to its own shard, at which some device attends to some key."""
        tables, which = self._tables
        return [hop for hop in range(1, len(which)) if any(len(tables[one]) for one in which[hop])]

    @cached_property
    def num_pairs(self) -> int:
        """Pairs of blocks that all devices compute, each shard once."""
        tables, which = self._tables
        return sum(len(tables[one]) for one in which.flat)

    @property
    def needed(self) -> Fraction:
        """The part of the computed scores that causal attention needs."""
        seq_len = self.grid.seq_len * self.layout.chunks.size
        return Fraction(needed_scores(seq_len, self.window)) / (self.num_pairs * self.grid.size**2)

    @property
    def rank(self) -> jax.Array | int:
        """The shard of this device."""
        return lax.axis_index(self.axes) // self.group if self.axes else 0

    def source(self, hop: jax.Array | int) -> jax.Array | int:
        """The shard that this device meets at a hop."""
        return (self.rank - hop) % self.layout.num_shards if self.axes else 0

    def tokens(self, shard: jax.Array | int, segments: Int[Array, "B S"]) -> Tokens:
        return Tokens(self.layout.tokens_of(shard, segments.shape[1]), segments)

    def with_table(self, hop: Any, hops: Sequence[int], run: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
        """`run(table, carry)` with the table of this device at a hop; the carry itself if the table is empty.

        Args:
          hop: one of `hops`, perhaps traced.
        """
        tables, which = self._tables
        used = which[list(hops)]
        by_length: dict[int, list[int]] = {}
        for one in np.unique(used):
            by_length.setdefault(len(tables[one]), []).append(int(one))

        def branch(alike: list[int], index: jax.Array, carry: Any) -> Any:
            stacked = np.stack([tables[one] for one in alike])
            if not stacked.size:
                return carry
            if len(alike) == 1:
                return run(jnp.asarray(stacked[0]), carry)
            place = np.zeros(len(tables), np.int32)
            place[alike] = np.arange(len(alike))
            return run(jnp.asarray(stacked)[jnp.asarray(place)[index]], carry)

        index = jnp.asarray(which, jnp.int32)[hop, self.rank]
        if len(by_length) == 1:
            return branch(*by_length.values(), index, carry)
        group = np.zeros(len(tables), np.int32)
        for number, alike in enumerate(by_length.values()):
            group[alike] = number
        times = [int(np.isin(used, alike).sum()) for alike in by_length.values()]
        with jax.named_scope(f"taken_{'_'.join(map(str, times))}_of_{used.size}"):
            return lax.switch(
                jnp.asarray(group)[index], [partial(branch, alike) for alike in by_length.values()], index, carry
            )

    def meet(self, visit: Visit, carry: Any, keys: Any) -> tuple[Any, Any]:
        """Visits the keys of each shard that a query attends to; returns the carry, and what is added for this shard.

        Communication: `keys` by `hops` messages round the ring, and what is added by one more; or an all-gather of
          `keys`, and a reduce-scatter of what is added.
        """
        if not self.hops:
            return visit(0, [0], carry, keys)
        return self._gather(visit, carry, keys) if self.gathers else self._travel(visit, carry, keys)

    def _gather(self, visit: Visit, carry: Any, keys: Any) -> tuple[Any, Any]:
        gathered = jax.tree.map(lambda x: lax.all_gather(x, self.axes, axis_index_groups=self._groups), keys)

        def of(shard: Any, x: jax.Array) -> jax.Array:
            return lax.dynamic_index_in_dim(x, shard, keepdims=False)

        def step(state: Any, hop: Any, hops: Sequence[int]) -> Any:
            carry, added = state
            shard = self.source(hop)
            carry, more = visit(hop, hops, carry, jax.tree.map(partial(of, shard), gathered))
            return carry, jax.tree.map(lambda x, part: x.at[shard].add(part), added, more)

        _, more = jax.eval_shape(partial(visit, 0, [0]), carry, keys)
        zeros = jax.tree.map(lambda x: jnp.zeros((self.layout.num_shards, *x.shape), x.dtype), more)
        zeros = jax.tree.map(lambda x: varying_like(x, jax.tree.leaves(keys)[0]), zeros)
        state = step((carry, zeros), 0, [0])
        hops = jnp.asarray(self.hops, jnp.int32)
        carry, added = lax.scan(lambda state, hop: (step(state, hop, self.hops), None), state, hops)[0]
        return carry, jax.tree.map(lambda x: lax.psum_scatter(x, self.axes, axis_index_groups=self._groups), added)

    def _travel(self, visit: Visit, carry: Any, keys: Any) -> tuple[Any, Any]:
        """Each visit sends the keys on before it computes, so that they travel meanwhile."""

        def step(state: Any, hop: Any, hops: Sequence[int], by: int, on: int) -> Any:
            carry, keys, added = state
            ahead = self._send(keys, on) if on else keys
            added = self._send(added, by)
            carry, more = visit(hop, hops, carry, keys)
            return carry, ahead, jax.tree.map(jnp.add, added, more)

        first, *others = self.hops
        ahead = self._send(keys, first)
        state = *visit(0, [0], carry, keys), ahead
        state = (state[0], state[2], state[1])
        last = self.hops[-1]
        if last == len(self.hops) > 2:
            most = self.hops[:-1]
            state = lax.scan(lambda s, hop: (step(s, hop, most, 1, 1), None), state, jnp.asarray(most, jnp.int32))[0]
            state = step(state, last, [last], 1, 0)
        else:
            for before, hop, after in zip([0, *self.hops], self.hops, [*others, last], strict=False):
                state = step(state, hop, [hop], hop - before, after - hop)
        carry, _, added = state
        return carry, self._send(added, self.layout.num_shards - last)

    def _send(self, tree: Any, by: int) -> Any:
        """Sends arrays to the shard that is `by` after this one."""
        num_devices = self.layout.num_shards * self.group
        pairs = [(rank, (rank + by * self.group) % num_devices) for rank in range(num_devices)]
        return jax.tree.map(lambda x: permute(x, self.axes, pairs), tree)

    @property
    def _groups(self) -> list[list[int]] | None:
        """The devices that hold the different shards of the same heads; None for all."""
        if self.group == 1:
            return None
        num_devices = self.layout.num_shards * self.group
        return [list(range(first, num_devices, self.group)) for first in range(self.group)]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    shards: Shards,
    q: Float[Array, "B K G S h"],
    k: Float[Array, "B K S h"],
    v: Float[Array, "B K S h"],
    segments: Int[Array, "B S"],
    window: Int[Array, ""] | None,
) -> Float[Array, "B K G S h"]:
    """Computes `softmax(q k^T) v` of this device's queries, over the keys of all shards.

    Args:
      q: already divided by the square root of head_dim.
      segments: the document of each token.
      window: how many tokens a query attends to, including its own; None for all up to its own.

    Memory: beside the result, its gradient and the arguments, the scores of one pair of blocks; the keys and values of
      a shard twice, or of all shards if they are gathered.
    Numerics: the softmax and all sums over blocks in float32 at least.
    Communication: see `Shards.meet`, of k, v and segments forward and backward; backward of the gradients of k and v,
      in float32 at least.
    """
    return _attend_forward(shards, q, k, v, segments, window)[0]


def _attend_forward(shards: Shards, q, k, v, segments, window):
    queries = shards.tokens(shards.rank, segments)

    def visit(hop: Any, hops: Sequence[int], state: Any, keys: Any) -> tuple[Any, tuple[()]]:
        k, v, theirs = keys

        def run(pairs: jax.Array, state: Any) -> Any:
            met = shards.tokens(shards.source(hop), theirs)
            return extend(shards.grid, state, q, k, v, queries, met, window, pairs)

        return shards.with_table(hop, hops, run, state), ()

    with needed(shards.needed):
        state, _ = shards.meet(visit, empty(q), (k, v, segments))
    out = state.result().astype(v.dtype)
    return out, (q, k, v, segments, window, out, state.log_mass())


def _attend_backward(shards: Shards, saved, grad):
    q, k, v, segments, window, out, log_mass = saved
    queries = shards.tokens(shards.rank, segments)
    known = backward_of(out, log_mass, grad)

    def zeros(x: jax.Array) -> jax.Array:
        return varying_like(jnp.zeros(x.shape, log_mass.dtype), q)

    def visit(hop: Any, hops: Sequence[int], of_q: jax.Array, keys: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        k, v, theirs = keys

        def run(pairs: jax.Array, grads: Any) -> Any:
            met = shards.tokens(shards.source(hop), theirs)
            return add_gradients(shards.grid, grads, known, q, k, v, queries, met, window, pairs)

        of_q, *added = shards.with_table(hop, hops, run, (of_q, zeros(k), zeros(v)))
        return of_q, tuple(added)

    with needed(shards.needed):
        of_q, added = shards.meet(visit, zeros(q), (k, v, segments))
    grads = (of_q, *added)
    return *(x.astype(like.dtype) for x, like in zip(grads, (q, k, v), strict=True)), None, None


attend.defvjp(_attend_forward, _attend_backward)
