"""Attention in blocks over rows whose tokens are on one device, or sharded over several.

Each device has the queries of its shard, and computes with the keys of one shard after the other, beginning with its
own. The keys travel round a ring, or devices exchange them in pairs, or every device gathers all of them first.

Source: Liu et al. 2023, arXiv:2310.01889 (ring attention).

Shapes: B batch, H heads, K kv_heads, S tokens of a shard, h head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from meshpar.collectives.permute import permute
from meshpar.collectives.swap import pairings, swap
from meshpar.mesh.varying import Axes, varying_like
from meshpar.nn.attention.core import Documents
from meshpar.nn.attention.online_softmax import Inputs, Tokens, add_gradients, backward_of, empty, extend
from meshpar.nn.attention.tables import Grids, ShardTables
from meshpar.nn.remat import named
from meshpar.parallel.scopes import needed, taken
from meshpar.parallel.xla import in_order, not_before, recomputed

Compute = Callable[[Grids, Any, Inputs, jax.Array], Any]
"""(grids, carry, inputs, table) -> carry, after the pairs of the table."""
Visit = Callable[[Any, np.ndarray, Any, Any], tuple[Any, Any]]
"""(hop, the tables that devices need at it, carry, the keys of a shard) -> (carry, terms of the sums of that shard).
The tables are indices in `ShardTables.tables`, one for each device and each hop of the same loop."""


@dataclass(frozen=True)
class Shards:
    """The devices that share a row, and how the keys of one reach the queries of another.

    Args:
      axes: the mesh axes over which the row is sharded.
      group: the number of neighbouring devices that hold the same shard.
      way: how the keys travel: round a ring; in pairs, between devices that meet one after the other; or each device
        gathers those of all shards.
      cap: scores are `cap * tanh(score / cap)`; None for as they are.
    """

    tables: ShardTables
    axes: Axes = ()
    group: int = 1
    way: Literal["ring", "pairs", "gather"] = "ring"
    cap: float | None = None

    @property
    def num_shards(self) -> int:
        return self.tables.layout.num_shards

    @property
    def rank(self) -> jax.Array | int:
        """The shard of this device."""
        return lax.axis_index(self.axes) // self.group if self.axes else 0

    def source(self, hop: jax.Array | int) -> jax.Array | int:
        """The shard whose keys this device computes with at a hop."""
        return (self.rank - hop) % self.num_shards if self.axes else 0

    def tokens(self, shard: jax.Array | int, segments: Int[Array, "B S"]) -> Tokens:
        return Tokens(self.tables.layout.tokens_of(shard, segments.shape[1]), segments)

    def visiting(
        self, q: jax.Array, queries: Tokens, window: Any, compute: Compute, zeros: Callable[..., Any]
    ) -> Visit:  # fmt: skip
        """What computes with the keys of a shard.

        Args:
          zeros: (k, v) -> the terms of their sums before the first pair.
        """

        def visit(hop: Any, used: np.ndarray, carry: Any, of_shard: Any) -> tuple[Any, Any]:
            k, v, segments = of_shard
            keys = self.tokens(self.source(hop), segments)
            inputs = Inputs(q, k, v, queries, keys, window, self.tables.is_causal, self.cap)
            carry, *terms = self._at_hop(hop, used, compute, inputs, (carry, *zeros(k, v)))
            return carry, tuple(terms)

        return visit

    def _at_hop(self, hop: Any, used: np.ndarray, compute: Compute, inputs: Inputs, carry: Any) -> Any:
        """Runs the table of this device at a hop, if a query and a key can be in the same document.

        Args:
          hop: 0 for the device's own keys; else perhaps traced.
          used: the tables that devices need, see `Visit`.
        """
        run_table = partial(self._run_table, hop, used, compute, inputs)
        if not (isinstance(hop, int) and hop == 0):
            own, others = inputs.queries.segments, inputs.keys.segments
            overlap = (own.min(1) <= others.max(1)) & (others.min(1) <= own.max(1))
            return lax.cond(overlap.any(), run_table, lambda carry: carry, carry)
        if halves := self.tables.halves:
            carry = compute(Grids(halves, halves), carry, inputs, jnp.asarray(self.tables.diagonal))
        return run_table(carry)

    def _run_table(self, hop: Any, used: np.ndarray, compute: Compute, inputs: Inputs, carry: Any) -> Any:
        tables = self.tables.tables
        by_length = self.tables.by_length(used)
        which = jnp.asarray(self.tables.which, jnp.int32)[hop, self.rank]

        def of_length(same_length: list[int], which: jax.Array, carry: Any) -> Any:
            if not len(tables[same_length[0]]):
                return carry
            if len(same_length) == 1:
                return compute(self.tables.grids, carry, inputs, jnp.asarray(tables[same_length[0]]))
            place = np.searchsorted(same_length, np.arange(len(tables))).astype(np.int32)
            table = jnp.asarray(np.stack([tables[index] for index in same_length]))[jnp.asarray(place)[which]]
            return compute(self.tables.grids, carry, inputs, table)

        first, *others = by_length.values()
        if not others:
            return of_length(first, which, carry)
        branch = np.zeros(len(tables), np.int32)
        for number, same_length in enumerate(by_length.values()):
            branch[same_length] = number
        counts = [int(np.isin(used, same_length).sum()) for same_length in by_length.values()]
        with taken(*counts, of=used.size):
            branches = [partial(of_length, same_length) for same_length in by_length.values()]
            return lax.switch(jnp.asarray(branch)[which], branches, which, carry)

    def visit_all(self, visit: Visit, carry: Any, keys: Any) -> tuple[Any, Any]:
        """Visits the keys of each shard that a query attends to. Returns the carry, and the sums of this shard's terms.

        Communication: round the ring, a message of `keys` at each hop, and one more message of the sums than hops; or
          in pairs, a message of each for each other shard; or an all-gather of `keys`, and a reduce-scatter of the
          sums.
        """
        if not self.tables.hops:
            return visit(0, self._used([0]), carry, keys)
        return {"gather": self._gather, "pairs": self._pair, "ring": self._travel}[self.way](visit, carry, keys)

    def _used(self, hops: Sequence[int]) -> np.ndarray:
        return self.tables.which[list(hops)]

    def sent_after(self, x: jax.Array, segments: Int[Array, "B S"]) -> Int[Array, "B S"]:
        """The documents of this shard's keys, which are sent only when x is known.

        They depend on no layer. JAX would send them round the ring in a loop of its own, before the layers, and XLA:CPU
        would start other messages while that loop runs, see `in_order`.
        """
        if not self.tables.hops:
            return segments
        return in_order(not_before(segments, x), x)

    def _gather(self, visit: Visit, carry: Any, keys: Any) -> tuple[Any, Any]:
        gathered = jax.tree.map(lambda x: lax.all_gather(x, self.axes, axis_index_groups=self.groups), keys)

        def step(state: Any, hop: Any, hops: Sequence[int]) -> Any:
            carry, added = state
            shard = self.source(hop)
            received = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, shard, keepdims=False), gathered)
            carry, more = visit(hop, self._used(hops), carry, received)
            return carry, jax.tree.map(lambda x, part: x.at[shard].add(part), added, more)

        carry, first = visit(0, self._used([0]), carry, keys)
        zeros = jax.tree.map(lambda x: varying_like(jnp.zeros((self.num_shards, *x.shape), x.dtype), x), first)
        added = jax.tree.map(lambda x, part: x.at[self.rank].set(part), zeros, first)
        hops = self.tables.hops
        state, _ = lax.scan(lambda state, hop: (step(state, hop, hops), None), (carry, added), jnp.array(hops, "int32"))
        carry, added = state
        return carry, jax.tree.map(lambda x: lax.psum_scatter(x, self.axes, axis_index_groups=self.groups), added)

    def _pair(self, visit: Visit, carry: Any, keys: Any) -> tuple[Any, Any]:
        """Meets one device after the other: each visits the other's keys, and returns the terms of their sums."""
        n, group = self.num_shards, self.group
        carry, added = visit(0, self._used([0]), carry, keys)
        for partners in pairings(n):
            hops = (np.arange(n) - partners) % n
            used = self.tables.which[hops, np.arange(n)]
            if not any(len(self.tables.tables[table]) for table in used):
                continue
            keys, carry = lax.optimization_barrier((keys, carry))  # else XLA may exchange the keys of all rounds first
            received = jax.tree.map(lambda x: swap(x, self.axes, partners, group), keys)  # noqa: B023
            hop = jnp.asarray(hops.astype(np.int32))[self.rank]
            carry, more = visit(hop, used, carry, received)
            more = jax.tree.map(lambda x: swap(x, self.axes, partners, group), more)  # noqa: B023
            added = jax.tree.map(jnp.add, added, more)
        return carry, added

    def _travel(self, visit: Visit, carry: Any, keys: Any) -> tuple[Any, Any]:
        """Sends the keys round the ring. Each step sends them, and the sums of earlier steps, before it computes."""
        hops = self.tables.hops

        def step(state: Any, hop: Any, hops: Sequence[int], by: int, on: int) -> Any:
            carry, keys, added = state
            ahead = self._send(keys, on) if on else keys
            added = self._send(added, by)
            carry, more = visit(hop, self._used(hops), carry, keys)
            return carry, ahead, jax.tree.map(jnp.add, added, more)

        ahead = self._send(keys, hops[0])
        carry, added = visit(0, self._used([0]), carry, keys)
        state = carry, ahead, added
        if hops == [*range(1, len(hops) + 1)] and len(hops) > 2:  # one loop compiles all hops but the last once
            loop = jnp.array(hops[:-1], "int32")
            state, _ = lax.scan(lambda state, hop: (step(state, hop, hops[:-1], 1, 1), None), state, loop)
            state = step(state, hops[-1], hops[-1:], 1, 0)
        else:
            for before, hop, after in zip([0, *hops], hops, [*hops[1:], hops[-1]], strict=False):
                state = step(state, hop, [hop], hop - before, after - hop)
        carry, _, added = state
        return carry, self._send(added, self.num_shards - hops[-1])

    def _send(self, tree: Any, by: int) -> Any:
        """Sends arrays to the shard that is `by` after this one."""
        num_devices = self.num_shards * self.group
        pairs = [(rank, (rank + by * self.group) % num_devices) for rank in range(num_devices)]
        return jax.tree.map(lambda x: permute(x, self.axes, pairs), tree)

    @property
    def groups(self) -> list[list[int]] | None:
        """The devices that hold different shards of the same heads; None for all."""
        if self.group == 1:
            return None
        return np.arange(self.num_shards * self.group).reshape(-1, self.group).T.tolist()


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    shards: Shards,
    q: Float[Array, "B S H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    documents: Documents,
    window: Int[Array, ""] | None,
) -> tuple[Float[Array, "B S H h"], Bool[Array, "B H S"]]:
    """Computes `softmax(q k^T) v` of this device's queries, over the keys of all shards.

    Args:
      q: already divided by the square root of head_dim.
      window: how many tokens a query attends to, including its own; None for all up to its own.

    Returns:
      The result; and whether each query attends to any key: if not, its result has no meaning.

    Memory: in addition to the result, its gradient and the arguments, the scores of one pair of blocks; the keys and
      values of a shard twice, or of all shards if they are gathered.
    Numerics: the softmax and all sums over blocks in float32 at least.
    Communication: see `Shards.visit_all`: k, v and segments forward and backward; backward also the gradients of k and
      v, in float32 at least.
    """
    return _attend_forward(shards, q, k, v, documents, window)[0]


def _attend_forward(shards: Shards, q, k, v, documents, window):
    queries = shards.tokens(shards.rank, documents.queries)

    def compute(grids: Grids, carry: Any, inputs: Inputs, pairs: jax.Array) -> Any:
        return (extend(grids, carry[0], inputs, pairs),)

    visit = shards.visiting(q, queries, window, compute, lambda k, v: ())
    with needed(shards.tables.needed):
        state, _ = shards.visit_all(visit, empty(q), (k, v, shards.sent_after(q, documents.keys)))
    out = named(state.result().astype(v.dtype), "attn")
    return (out, state.sees()), (q, k, v, documents, window, out, named(state.log_mass(), "log_mass"))


def _attend_backward(shards: Shards, saved, grads):
    q, k, v, documents, window, out, log_mass = saved
    grad, _ = grads
    window = None if window is None else jnp.asarray(window)  # JAX returns a saved constant as a NumPy scalar
    q, k, v, out, grad = recomputed((q, k, v, out, grad))  # else XLA:CPU transposes them in the forward, too
    queries = shards.tokens(shards.rank, documents.queries)
    known = backward_of(out, log_mass, grad)

    # Otherwise XLA:CPU fills the zeros of all layers when the step begins.
    zero = in_order(jnp.int32(0), grad).astype(log_mass.dtype)

    def zeros(x: jax.Array) -> jax.Array:
        return varying_like(jnp.broadcast_to(zero, x.shape), q)

    def compute(grids: Grids, grads: Any, inputs: Inputs, pairs: jax.Array) -> Any:
        return add_gradients(grids, grads, known, inputs, pairs)

    visit = shards.visiting(q, queries, window, compute, lambda k, v: (zeros(k), zeros(v)))
    with needed(shards.tables.needed):
        of_q, added = shards.visit_all(visit, zeros(q), (k, v, shards.sent_after(grad, documents.keys)))
    grads = (of_q, *added)
    return *(x.astype(like.dtype) for x, like in zip(grads, (q, k, v), strict=True)), None, None


attend.defvjp(_attend_forward, _attend_backward)
