"""Compiles a step of local shards as one `shard_map`, and places its first state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from byhand import adamw

KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}
"""For XLA:CPU, which otherwise removes the barriers before it merges equal operations."""


def compile_local(
    local: Callable[[Any, Any], tuple[Any, jax.Array]],
    mesh: Mesh,
    params: Any,
    specs: Any,
    batch: Any,
    rows: str | tuple[str, ...] | None,
) -> tuple[Callable[[Any, Any], tuple[Any, jax.Array]], Any, Any]:
    """A compiled, donated step `state, loss = step(state, batch)`, its first state, and the batch on its devices.

    Args:
      params: whole arrays on the host.
      specs: how each is sharded.
      rows: the axes that shard the rows of the batch.
    """
    state_specs = {"params": specs, "mean": specs, "square": specs, "step": P()}
    batch_specs = {name: P(rows) for name in batch}
    step = jax.shard_map(
        local, mesh=mesh, in_specs=(state_specs, batch_specs), out_specs=(state_specs, P()), check_vma=False
    )
    place = partial(jax.tree.map, lambda spec: NamedSharding(mesh, spec), is_leaf=lambda x: isinstance(x, P))
    placed = jax.device_put(batch, place(batch_specs))
    state = jax.jit(adamw.init, out_shardings=place(state_specs))(jax.device_put(params, place(specs)))
    lowered = jax.jit(step, donate_argnums=0).lower(state, placed)
    return lowered.compile(compiler_options=KEEP_BARRIERS), state, placed
