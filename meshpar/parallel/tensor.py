"""Tensor parallelism as in Megatron-LM, with and without its sequence parallelism.

A block enters a region in which a dim (heads, mlp, vocab) is sharded over axes t, and exits it with a partial sum on
each device. With sequence parallelism the residual stream outside of the region is sharded in `residual_seq`:

    enter_region: x[B, S, D] -> x[B, S, D]          or  x[B, S_t, D] -> x[B, S, D]     all-gather
    exit_region: y[B, S, D] {partial over t} -> y  all-reduce  or  y[B, S_t, D]       reduce-scatter

Each is the transpose of the other, so a block sends 8(t-1)/t b s d bytes in both forms, forward and backward
together. On one device and under GSPMD both are the identity.

Source: Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198.
"""

from __future__ import annotations

from itertools import groupby

from jax import lax
from jaxtyping import Array, Float, Shaped

from meshpar.mesh.varying import varying
from meshpar.parallel.context import manual_axes
from meshpar.parallel.local import shard
from meshpar.parallel.sequence import SEQ


def enter_region(x: Float[Array, "B R D"], dim: str) -> Float[Array, "B S D"]:
    """Prepares `x` for multiplication by weights whose `dim` is sharded (column parallel).

    Args:
      x: [batch, residual_seq, embed].
      dim: the weights' dim that is sharded within the region.

    Returns:
      [batch, seq, embed], the same on every device of the axes of `dim`.

    Communication: with sequence parallelism an all-gather; otherwise none forward and an all-reduce backward.
    """
    x = whole_seq(x)
    return varying(x, manual_axes(dim)) if manual_axes(dim) else x


def exit_region(y: Float[Array, "B S D"], dim: str) -> Float[Array, "B R D"]:
    """Sums the devices' partial sums over the shards of `dim` (row parallel).

    Args:
      y: [batch, seq, embed], a partial sum on each device of the axes of `dim`.

    Returns:
      [batch, residual_seq, embed].

    Communication: an all-reduce; with sequence parallelism a reduce-scatter.
    """
    seq_axes = manual_axes("residual_seq")
    partial = manual_axes(dim)
    if rest := tuple(a for a in partial if a not in seq_axes):
        y = lax.psum(y, rest)
    # In the order of `enter_region`'s gather, so that each device gets back the part of the sequence that it had.
    for is_partial, group in groupby(seq_axes, partial.__contains__):
        axes = tuple(group)
        # Over an axis that shards the sequence but not `dim`, every device has the full sum already.
        y = lax.psum_scatter(y, axes, scatter_dimension=SEQ, tiled=True) if is_partial else shard(y, axes, SEQ)
    return y


def whole_seq(x: Shaped[Array, "B R *rest"]) -> Shaped[Array, "B S *rest"]:
    """[batch, seq, ...] from the devices' shards of the residual stream; `local_seq` undoes it.

    Communication: with sequence parallelism an all-gather; otherwise none.
    """
    seq_axes = manual_axes("residual_seq")
    return lax.all_gather(x, seq_axes, axis=SEQ, tiled=True) if seq_axes else x


def local_seq(x: Shaped[Array, "B S *rest"]) -> Shaped[Array, "B R *rest"]:
    """The part of [batch, seq, ...] that belongs to this device's shard of the residual stream."""
    return shard(x, manual_axes("residual_seq"), SEQ)
