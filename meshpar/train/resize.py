"""Continues local updates with another number of slices than a checkpoint has.

Each new slice begins with the means of parameters, moments and rounding errors over the saved slices, and with the
largest of their counters. So the mean difference of the round stays the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.checkpoint.saved import Checkpoint
from meshpar.parallel.precision import wide
from meshpar.train.error_feedback import SLICES
from meshpar.train.program import shardings
from meshpar.train.state import TrainState

WHOLE = ("means",)
"""The arrays in `carried[SLICES]` without a dim of slices."""


def num_slices(saved: Checkpoint) -> int | None:
    """The number of slices in a checkpoint; None without local updates."""
    shape = saved.meta["arrays"].get("skipped", {}).get("shape")
    return shape[0] if shape else None


def with_slices(structs: TrainState, num: int) -> TrainState:
    """The state with another number of slices. Each device has its shard of all slices."""

    def resized(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec(None, *struct.sharding.spec[1:])  # pyright: ignore
        sharding = NamedSharding(struct.sharding.mesh, spec)  # pyright: ignore
        return jax.ShapeDtypeStruct((num, *struct.shape[1:]), struct.dtype, sharding=sharding)

    return _on_slices(lambda arrays: jax.tree.map(resized, arrays), structs)


def averaged(state: TrainState, structs: TrainState) -> TrainState:
    """The state with the number of slices of `structs`, from one of `with_slices`.

    Communication: none.
    Memory: the arrays of all saved slices, beside the new ones.
    """

    def mean(x: jax.Array, struct: jax.ShapeDtypeStruct) -> jax.Array:
        one = wide(x).mean(0) if jnp.issubdtype(x.dtype, jnp.inexact) else x.max(0)
        return jnp.broadcast_to(one.astype(struct.dtype), struct.shape)

    def means(arrays: Any, like: Any) -> Any:
        compute = jax.jit(lambda arrays: jax.tree.map(mean, arrays, like), out_shardings=shardings(like))
        return compute(arrays)

    return _on_slices(means, state, structs)


def _on_slices(change: Callable[..., Any], *states: TrainState) -> TrainState:
    """The first state, with `change` of the arrays of slices in all states."""
    each = [{k: x for k, x in s.carried[SLICES].items() if k not in WHOLE} for s in states]
    own = states[0].carried[SLICES] | change(*each)
    skipped = change(*(state.skipped for state in states))
    return replace(states[0], skipped=skipped, carried=states[0].carried | {SLICES: own})
