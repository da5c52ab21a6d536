"""`lax.ragged_all_to_all`, with an equivalent for backends that do not support it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives.execute import manual_axes
from meshpar.collectives.operations import all_gather, all_to_all
from meshpar.mesh.varying import Axes

NATIVE = ("tpu", "cuda", "rocm")
"""Platforms whose compiler supports a ragged all-to-all."""


def ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axes: str | Axes,
) -> jax.Array:
    """Sends a different number of rows of `operand` to each rank, and writes the received rows into `output`.

    Args:
      operand: [rows, ...]. Rank i receives `send_sizes[i]` rows from `input_offsets[i]` on.
      output: [rows, ...]. Rows that no rank writes keep their values.
      input_offsets: int[n].
      send_sizes: int[n].
      output_offsets: int[n]. The row of rank i's output at which this rank's rows begin.
      recv_sizes: int[n]. The number of rows that rank i sends to this rank.

    Communication: on TPUs and GPUs the rows that are sent. CPUs gather the operands of all ranks: n-1 times its bytes.

    >>> def local(x, sizes):  # rank 0 sends one row to rank 0 and two to rank 1; rank 1 sends one row to each
    ...     starts = jnp.cumsum(sizes) - sizes
    ...     received = all_to_all(sizes, "a")
    ...     offsets = all_to_all(jnp.cumsum(received) - received, "a")
    ...     return ragged_all_to_all(x, jnp.zeros_like(x), starts, sizes, offsets, received, axes="a")
    >>> mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> f = jax.shard_map(local, mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a"))
    >>> jax.jit(f)(jnp.arange(1.0, 7.0), jnp.array([1, 2, 1, 1])).tolist()
    [1.0, 4.0, 0.0, 2.0, 3.0, 5.0]
    """
    axes = manual_axes(axes)
    arguments = operand, output, input_offsets, send_sizes, output_offsets, recv_sizes
    native = dict.fromkeys(NATIVE, partial(lax.ragged_all_to_all, axis_name=axes))
    return lax.platform_dependent(*arguments, default=partial(_by_all_gather, axes), **native)


def _by_all_gather(axes: Axes, *arguments: jax.Array) -> jax.Array:
    """`ragged_all_to_all` for any backend: every rank gathers all operands, and selects its rows."""
    operand, output, input_offsets, _, output_offsets, recv_sizes = arguments
    offsets = jnp.stack([input_offsets, output_offsets], axis=1)
    begin, put = all_to_all(offsets, axes).T  # for the rows from each rank: their place in its operand, and in `output`
    whole = all_gather(operand[None], axes)
    rows = jnp.arange(len(output), dtype=put.dtype)
    for rank in range(len(whole)):
        mine = (rows >= put[rank]) & (rows < put[rank] + recv_sizes[rank])
        received = whole[rank, jnp.clip(rows - put[rank] + begin[rank], 0, len(operand) - 1)]
        output = jnp.where(mine.reshape(-1, *[1] * (output.ndim - 1)), received, output)
    return output
