"""Linear maps of local shards, and the communication that is hidden behind them.

A block's first maps are column parallel, its last is row parallel; between them a dim t is sharded:

    column_parallel: x[B, S, D] @ w[D, N_t] -> y[B, S, N]               `tensor.enter_region`, then the products
    row_parallel: h[B, S, N] {shard of N} @ w[N_t, D] -> y[B, S, D]  the product, then `tensor.exit_region`

With sequence parallelism both communicate x or y, of which each device has S_t; with ZeRO-3 it is the weights that are
gathered, at D or at N. Either can be hidden: the product is computed in chunks, while others are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshpar.collectives.matmul import all_gather_matmul, matmul_reduce_scatter
from meshpar.collectives.ring import Ring
from meshpar.parallel import tensor
from meshpar.parallel.context import manual
from meshpar.parallel.data import Stored

_BATCH, _INPUTS, _OUTPUTS = "bs", "ijk", "xyz"


class Weights(NamedTuple):
    """The weights of a linear map.

    Args:
      kernel: [inputs..., outputs...].
      num_inputs: how many of its dims are contracted.
      stored: (position of a dim, axes) over which it is still to be gathered, see `data.streamed`.
      adapter: x -> what is added to the product, such as LoRA's; not where the product is overlapped.
    """

    kernel: jax.Array
    num_inputs: int = 1
    stored: Stored = ()
    adapter: Callable[[jax.Array], jax.Array] | None = None

    @property
    def dims(self) -> str:
        """A letter for each dim."""
        return _INPUTS[: self.num_inputs] + _OUTPUTS[: self.kernel.ndim - self.num_inputs]

    @property
    def equation(self) -> str:
        """Of `einsum(x, kernel)`, x being [batch, seq, inputs...]."""
        inputs, outputs = self.dims[: self.num_inputs], self.dims[self.num_inputs :]
        return f"{_BATCH}{inputs},{self.dims}->{_BATCH}{outputs}"


def column_parallel(x: jax.Array, maps: Sequence[Weights], dim: str) -> tuple[jax.Array, ...]:
    """Column parallel: each product of x with weights whose `dim` is sharded.

    Args:
      x: [batch, residual_seq, inputs...].
      maps: weights that have as many dims each.
      dim: the weights' dim that is sharded.

    Returns:
      [batch, seq, outputs...] of each.

    Communication: that of `tensor.enter_region`; overlapped, of `all_gather_matmul`: chunks of x once more for the
    backward.
    """
    ring = _sequence_ring(dim)
    if ring is None:
        x = tensor.enter_region(x, dim)
        return tuple(_with_adapter(x, one) for one in maps)
    return all_gather_matmul(maps[0].equation, x, [one.kernel for one in maps], ring, dim=_BATCH[tensor.SEQ])


def row_parallel(x: jax.Array, weights: Weights, dim: str) -> jax.Array:
    """Row parallel: the product of x with weights whose `dim` is sharded and contracted.

    Args:
      x: [batch, seq, inputs...], local in `dim`.

    Returns:
      [batch, residual_seq, outputs...].

    Communication: that of `tensor.exit_region`; overlapped, of `matmul_reduce_scatter`, which sends the same.
    """
    ring = _sequence_ring(dim)
    if ring is None:
        return tensor.exit_region(_with_adapter(x, weights), dim)
    return matmul_reduce_scatter(weights.equation, x, weights.kernel, ring, dim=_BATCH[tensor.SEQ])


def _with_adapter(x: jax.Array, weights: Weights) -> jax.Array:
    product = _product(x, weights)
    return product if weights.adapter is None else product + weights.adapter(x)


def _product(x: jax.Array, weights: Weights) -> jax.Array:
    """x @ kernel, where the kernel may be gathered while it is multiplied.

    Communication: of a kernel that is still stored, that of `all_gather_matmul`: all-gather forward; backward another
      and a reduce-scatter of the gradient.
    """
    if not weights.stored:
        return jnp.tensordot(x, weights.kernel, axes=weights.num_inputs)
    ctx, [(position, axes)] = manual(), weights.stored
    assert ctx is not None, "only there parameters are stored in shards"
    of_x, of_kernel, of_y = weights.equation.replace("->", ",").split(",")
    ring = Ring(axes, both_ways=ctx.parallel.fsdp.overlap == "bidirectional")
    equation = f"{of_kernel},{of_x}->{of_y}"
    return all_gather_matmul(equation, weights.kernel, [x], ring, dim=of_kernel[position])[0]


def _sequence_ring(dim: str) -> Ring | None:
    """The ring round which the parts of the sequence travel, if they do so while they are multiplied."""
    ctx = manual()
    if ctx is None or not ctx.overlaps(dim):
        return None
    return Ring(ctx.axes(dim), both_ways=ctx.parallel.tensor.overlap == "bidirectional")
