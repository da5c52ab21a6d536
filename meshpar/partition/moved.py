"""Performs the moves of `layout` on local shards, inside `shard_map`."""

from __future__ import annotations

from functools import partial

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshpar.collectives.matmul import PRODUCT
from meshpar.mesh.varying import Axes, invariant, varies_over, varying
from meshpar.parallel.local import shard
from meshpar.partition.layout import Layout, Move, Sizes, moves


def moved(x: jax.Array, layout: Layout, axes: tuple[Axes, ...], varies: frozenset[str], sizes: Sizes) -> jax.Array:
    """Changes a local shard of `layout` to one without pending sums, sharded over `axes`.

    Args:
      varies: the axes over which the result is typed as varying. A copy that is typed as varying over others is typed
        as a copy: the plan knows that it is one.

    Communication: that of `layout.moves`; backward that of the transposes.
    """
    for move in moves(layout, axes, varies, sizes):
        x = _perform(move, x)
    return varying(invariant(x, tuple(sorted(varies_over(x) - varies))), tuple(sorted(varies)))


def _perform(move: Move, x: jax.Array) -> jax.Array:
    # A checkpoint's policy that saves products saves these sums: a part of a sum would be summed again.
    if move.kind == "all-reduce":
        return checkpoint_name(lax.psum(x, move.axes), PRODUCT)
    if move.kind == "reduce-scatter":
        return checkpoint_name(lax.psum_scatter(x, move.axes, scatter_dimension=move.dim, tiled=True), PRODUCT)
    if move.kind == "all-to-all":
        return lax.all_to_all(x, move.axes, split_axis=move.to_dim, concat_axis=move.dim, tiled=True)
    if move.kind == "all-gather":
        to = "varying" if move.varies else "invarying"
        return lax.all_gather(x, move.axes, axis=move.dim, tiled=True, to=to)
    return _sliced(x, move.axes, move.dim)


def _sliced(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """This device's part of a whole dim. Backward, the parts of an invariant value are gathered, not summed."""
    for axis in axes:
        cut = partial(shard, axes=(axis,), dim=dim)
        x = cut(x) if axis in varies_over(x) else _slice_of_invariant(x, axis, dim)
    return x


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _slice_of_invariant(x: jax.Array, axis: str, dim: int) -> jax.Array:
    return shard(varying(x, (axis,)), (axis,), dim)


def _slice_backward(axis: str, dim: int, _: None, grad: jax.Array) -> tuple[jax.Array]:
    return (lax.all_gather(grad, axis, axis=dim, tiled=True, to="invarying"),)


_slice_of_invariant.defvjp(lambda x, axis, dim: (_slice_of_invariant(x, axis, dim), None), _slice_backward)
