"""The executor: runs any plan as permutes, within a `shard_map`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.collectives.permute import permute
from meshpar.collectives.plan import NONE, Permute, Plan, Round
from meshpar.errors import MeshError, nearest
from meshpar.mesh.varying import Axes, varying


def execute(plan: Plan, blocks: jax.Array, axes: str | Axes) -> jax.Array:
    """Runs a plan over mesh axes.

    Args:
      blocks: [input blocks, ...]. This rank's input blocks; a rank is the index along `axes`, the first axis slowest.
      axes: mesh axes of the group, all manual.

    Returns:
      [output blocks, ...]. This rank's output blocks; zeros where the plan has none for it.

    Communication: the plan's. Rounds of the same form run as one loop. The transpose runs the transposed plan.
    Raises:
      MeshError: an axis is not manual here, or the group and the plan have different sizes.

    >>> from meshpar.collectives.algorithms import plan
    >>> mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> local = partial(execute, plan("all_reduce", "ring", 2), axes="a")
    >>> f = jax.shard_map(local, mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a"))
    >>> jax.jit(f)(jnp.arange(4.0)).tolist()
    [2.0, 4.0, 2.0, 4.0]
    """
    axes = manual_axes(axes)
    if (size := lax.axis_size(axes)) != plan.num_ranks:
        raise MeshError(f"a plan for {plan.num_ranks} ranks cannot run over {' x '.join(axes)} of {size} devices")
    return _execute(plan, axes, varying(blocks, axes))


def manual_axes(axes: str | Axes) -> Axes:
    """The axes as a tuple.

    Raises:
      MeshError: an axis is not manual where this code is traced.
    """
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    here = jax.sharding.get_abstract_mesh().manual_axes
    for axis in axes:
        if axis not in here:
            meant = f"did you mean {near}? " if (near := nearest(axis, here)) else ""
            known = f"manual here are {', '.join(here)}" if here else "no axis is manual here"
            raise MeshError(f"axis {axis!r} is not manual: {meant}{known}; call this within jax.shard_map over it")
    return axes


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _execute(plan: Plan, axes: Axes, blocks: jax.Array) -> jax.Array:
    def form(round_: Round) -> list[tuple[object, ...]]:
        return [(p.source.tolist(), p.target.tolist(), p.chunks.shape[1], p.adds) for p in round_]

    rank = lax.axis_index(axes)
    slots = _begin(plan, blocks, rank)
    for _, rounds in groupby(plan.rounds, form):
        slots = _run(list(rounds), slots, rank, axes)
    return _end(plan, slots, rank)


_execute.defvjp(
    lambda plan, axes, blocks: (_execute(plan, axes, blocks), None),
    lambda plan, axes, _, grad: (_execute(plan.transposed, axes, grad),),
)


def _begin(plan: Plan, blocks: jax.Array, rank: jax.Array) -> jax.Array:
    inputs = _Slots(plan.input_slots[None])
    if inputs.are_all(plan.num_chunks):
        return blocks
    empty = jnp.zeros((plan.num_chunks, *blocks.shape[1:]), blocks.dtype)
    return inputs.write(empty, inputs.only_there(blocks, jnp.zeros_like(blocks), rank), inputs.of(rank)[0])


def _end(plan: Plan, slots: jax.Array, rank: jax.Array) -> jax.Array:
    outputs = _Slots(plan.output_slots[None])
    if outputs.are_all(plan.num_chunks):
        return slots
    blocks = outputs.read(slots, outputs.of(rank)[0])
    return outputs.only_there(blocks, jnp.zeros_like(blocks), rank)


def _run(rounds: list[Round], slots: jax.Array, rank: jax.Array, axes: Axes) -> jax.Array:
    """Runs rounds of one form; several rounds become one loop."""
    lanes = [_Lane(permutes, axes) for permutes in zip(*rounds, strict=True)]

    def turn(slots: jax.Array, at: list[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, None]:
        arrived = [lane.send(slots, sent) for lane, (sent, _) in zip(lanes, at, strict=True)]
        for lane, message, (_, got) in zip(lanes, arrived, at, strict=True):
            slots = lane.receive(slots, message, got, rank)
        return slots, None

    at = [(lane.sent.of(rank), lane.got.of(rank)) for lane in lanes]
    if len(rounds) == 1:
        return turn(slots, jax.tree.map(lambda table: table[0], at))[0]
    return lax.scan(turn, slots, at)[0]


class _Lane:
    """One permute of a round, and the permutes of the same form in the rounds that follow."""

    def __init__(self, permutes: Sequence[Permute], axes: Axes):
        first = permutes[0]
        num_ranks = lax.axis_size(axes)
        self.axes = axes
        self.adds = first.adds
        self.pairs = list(zip(first.source.tolist(), first.target.tolist(), strict=True))
        slots = np.full((2, len(permutes), num_ranks, first.chunks.shape[1]), NONE)
        for sent, got, each in zip(*slots, permutes, strict=True):
            sent[each.source] = got[each.target] = each.chunks
        self.sent, self.got = map(_Slots, slots)

    def send(self, slots: jax.Array, at: jax.Array) -> jax.Array:
        message = self.sent.read(slots, at)
        if message.dtype != jnp.bfloat16:
            return permute(message, self.axes, self.pairs)
        # XLA's CPU compiler would send bfloat16 as float32, but does not convert integers.
        bits = lax.bitcast_convert_type(message, jnp.uint16)
        return lax.bitcast_convert_type(permute(bits, self.axes, self.pairs), message.dtype)

    def receive(self, slots: jax.Array, message: jax.Array, at: jax.Array, rank: jax.Array) -> jax.Array:
        if self.adds:  # a rank that receives nothing adds zeros
            return self.got.write(slots, self.got.read(slots, at) + message, at)
        if not self.got.there.all():
            message = self.got.only_there(message, self.got.read(slots, at), rank)
        return self.got.write(slots, message, at)


class _Slots:
    """The slots that each rank reads or writes in each round: int[rounds, n, c]; all NONE for a rank without any."""

    def __init__(self, table: np.ndarray):
        self.there = (table != NONE).all((0, 2))
        self.table = np.where(self.there[:, None], table, np.arange(table.shape[2]))
        self.in_a_row = bool((np.diff(self.table) == 1).all())

    def are_all(self, num_chunks: int) -> bool:
        """Whether every rank has all chunks, in order."""
        whole = np.arange(self.table.shape[2])
        return len(whole) == num_chunks and bool(self.there.all() and (self.table == whole).all())

    def of(self, rank: jax.Array) -> jax.Array:
        """The slots of one rank: int32[rounds, c]."""
        return jnp.asarray(self.table, jnp.int32)[:, rank]

    def only_there(self, x: jax.Array, otherwise: jax.Array, rank: jax.Array) -> jax.Array:
        return x if self.there.all() else jnp.where(jnp.asarray(self.there)[rank], x, otherwise)

    def read(self, slots: jax.Array, at: jax.Array) -> jax.Array:
        if self.in_a_row:
            return lax.dynamic_slice_in_dim(slots, at[0], len(at))
        return slots.at[at].get(mode="promise_in_bounds", unique_indices=True)

    def write(self, slots: jax.Array, chunks: jax.Array, at: jax.Array) -> jax.Array:
        if self.in_a_row:
            return lax.dynamic_update_slice_in_dim(slots, chunks, at[0], 0)
        return slots.at[at].set(chunks, mode="promise_in_bounds", unique_indices=True)
