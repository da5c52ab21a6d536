"""`lax.ragged_all_to_all`, and a twin for backends that have none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives.execute import Axes, manual_axes
from meshpar.collectives.operations import all_gather, all_to_all

HAVE_IT = ("tpu", "cuda", "rocm")
"""Platforms whose compiler knows a ragged all-to-all."""


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
    """Sends rows of `operand` to each rank, as many as each is to get, and writes what comes into `output`.

    Args:
      operand: [rows, ...]. For rank i: `send_sizes[i]` rows from `input_offsets[i]` on.
      output: [rows, ...]. What is not written stays.
      input_offsets: int[n].
      send_sizes: int[n].
      output_offsets: int[n]. Where rank i puts them in its output.
      recv_sizes: int[n]. How many rows come from rank i: what it has for `send_sizes` of this rank.

    Communication: the rows that are sent; the twin's all-gather sends the whole operand to all: (n-1) of its bytes.
    """
    arguments = operand, output, input_offsets, send_sizes, output_offsets, recv_sizes
    axes = manual_axes(axes)
    native = lambda *arguments: lax.ragged_all_to_all(*arguments, axis_name=axes)
    twin = lambda *arguments: ragged_all_to_all_twin(*arguments, axes=axes)
    return lax.platform_dependent(*arguments, default=twin, **dict.fromkeys(HAVE_IT, native))


def ragged_all_to_all_twin(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axes: str | Axes,
) -> jax.Array:
    """The same on any backend: everybody gets everything, and picks its rows."""
    there = jnp.stack([input_offsets, output_offsets], axis=1)
    begin, put = all_to_all(there, axes).T  # of what each rank has for this one: where it lies, where it goes
    whole = all_gather(operand[None], axes)
    rows = jnp.arange(len(output), dtype=put.dtype)
    for rank in range(len(whole)):
        mine = (rows >= put[rank]) & (rows < put[rank] + recv_sizes[rank])
        got = whole[rank, jnp.clip(rows - put[rank] + begin[rank], 0, len(operand) - 1)]
        output = jnp.where(mine.reshape(-1, *[1] * (output.ndim - 1)), got, output)
    return output
