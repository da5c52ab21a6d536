"""Products of rows, sorted by group, with one matrix for each group: the experts' matrix products.

Where the compiler has no kernel for it, `lax.ragged_dot` multiplies every row with the matrix of every group: on CPUs
and GPUs, and on TPUs for the gradient of the matrices. Here the rows of a group are multiplied in tiles, in a loop over
as many tiles as the group has. So the operations follow the rows that arrived, on every backend, however much room
there is for more.

Shapes: N rows, G groups, K and M the dims of a matrix, T rows of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from meshpar.cost.flops import needed
from meshpar.cost.walk import runs
from meshpar.mesh.varying import varying_alike, varying_like
from meshpar.parallel.context import current
from meshpar.parallel.precision import wide_dtype

SMALLEST = 64
LARGEST = 512
"""Bounds of the rows of a tile. On CPUs tiles of 16 rows take longer than tiles of 64, though they multiply fewer."""


class Tiles(NamedTuple):
    """How many rows a tile has, and how many tiles each group has if the router is balanced."""

    rows: int
    per_group: int

    @classmethod
    def of(cls, num_rows: int, groups: int, expected: int) -> Tiles:
        """The largest tiles that multiply at most a tenth more rows than `expected`, within the bounds.

        >>> Tiles.of(num_rows=196608, groups=8, expected=24576)
        Tiles(rows=256, per_group=12)
        """
        tenth = max(1, expected // (10 * groups))
        rows = min(num_rows, LARGEST, max(SMALLEST, 2 ** (tenth.bit_length() - 1)))
        return cls(rows, -(-expected // (groups * rows)))


def grouped_dot(
    x_NK: Float[Array, "N K"], w_GKM: Float[Array, "G K M"], sizes_G: Int[Array, "G"], expected: int
) -> Float[Array, "N M"]:
    """`x[n] @ w[g]` for the group g of each row n; 0 for rows beyond the last group's.

    Under GSPMD arrays are whole, and it is `lax.ragged_dot`, which XLA can partition.

    Args:
      sizes_G: int32, the number of rows of each group.
      expected: the number of rows of all groups, if the router is balanced. Programs are counted with it.

    Numerics: the gradient of w is summed over tiles in float32 at least.
    """
    x_NK, w_GKM, sizes_G = varying_alike(x_NK, w_GKM, sizes_G)
    ctx = current()
    if ctx is not None and not ctx.is_local:
        return lax.ragged_dot(x_NK, w_GKM, sizes_G)
    tiles = Tiles.of(len(x_NK), len(sizes_G), expected)
    with needed(Fraction(expected, len(sizes_G) * tiles.per_group * tiles.rows)):
        return _dot(x_NK, w_GKM, sizes_G, tiles)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dot(x_NK: jax.Array, w_GKM: jax.Array, sizes_G: jax.Array, tiles: Tiles) -> jax.Array:
    return _products("tk,km->tm", x_NK, w_GKM, sizes_G, tiles)


def _backward(tiles: Tiles, saved: tuple[jax.Array, ...], dy_NM: jax.Array) -> tuple[jax.Array, jax.Array, np.ndarray]:
    x_NK, w_GKM, sizes_G = saved
    dx_NK = _products("tm,km->tk", dy_NM, w_GKM, sizes_G, tiles)
    dw_GKM = _gradient(x_NK, dy_NM, sizes_G, tiles).astype(w_GKM.dtype)
    return dx_NK, dw_GKM, np.zeros(sizes_G.shape, jax.dtypes.float0)


_dot.defvjp(lambda x, w, sizes, tiles: (_dot(x, w, sizes, tiles), (x, w, sizes)), _backward)


def _products(equation: str, x_NK: jax.Array, w_GKM: jax.Array, sizes_G: jax.Array, tiles: Tiles) -> jax.Array:
    """The product of each row with the matrix of its group, by an equation for a tile; 0 for all other rows."""
    out = jax.eval_shape(partial(jnp.einsum, equation), x_NK, w_GKM[0])

    def of_group(y: jax.Array, group: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        w, start, size = group

        def add(y: jax.Array, row: jax.Array, is_own_T1: jax.Array) -> jax.Array:
            product = jnp.einsum(equation, _tile(x_NK, row, tiles), w)
            y_tile = jnp.where(is_own_T1, product, _tile(y, row, tiles))
            return lax.dynamic_update_slice_in_dim(y, y_tile, row, axis=0)

        return _over_tiles(add, y, start, size, len(x_NK), tiles), None

    y_NM = varying_like(jnp.zeros(out.shape, out.dtype), x_NK)
    return lax.scan(of_group, y_NM, (w_GKM, *_spans(sizes_G)))[0]


def _gradient(x_NK: jax.Array, dy_NM: jax.Array, sizes_G: jax.Array, tiles: Tiles) -> jax.Array:
    """[G, K, M]: the sum of `x[n] dy[n]` over the rows of each group."""
    dtype = wide_dtype(x_NK.dtype)

    def of_group(_: None, group: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
        start, size = group

        def add(dw: jax.Array, row: jax.Array, is_own_T1: jax.Array) -> jax.Array:
            x = jnp.where(is_own_T1, _tile(x_NK, row, tiles), jnp.zeros((), x_NK.dtype))
            return dw + jnp.einsum("tk,tm->km", x, _tile(dy_NM, row, tiles), preferred_element_type=dtype)

        zeros = varying_like(jnp.zeros((x_NK.shape[1], dy_NM.shape[1]), dtype), x_NK)
        return None, _over_tiles(add, zeros, start, size, len(x_NK), tiles)

    return lax.scan(of_group, None, _spans(sizes_G))[1]


def _spans(sizes_G: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first row of each group, and its number of rows."""
    return jnp.cumsum(sizes_G, dtype=jnp.int32) - sizes_G, sizes_G


def _tile(x_ND: jax.Array, row: jax.Array, tiles: Tiles) -> jax.Array:
    return lax.dynamic_slice_in_dim(x_ND, row, tiles.rows)


def _over_tiles(
    add: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    first: jax.Array, start: jax.Array, size: jax.Array, num_rows: int, tiles: Tiles,
) -> jax.Array:  # fmt: skip
    """`carry = add(carry, row, is_own)` for each tile of a group.

    A tile that would end beyond the array begins earlier, so not all of its rows are its own.
    """

    def step(i: jax.Array, carry: jax.Array) -> jax.Array:
        own = start + i * tiles.rows
        row = jnp.minimum(own, num_rows - tiles.rows)
        rows = row + jnp.arange(tiles.rows, dtype=jnp.int32)
        return add(carry, row, ((rows >= own) & (rows < start + size))[:, None])

    with runs(tiles.per_group):
        return lax.fori_loop(0, (size + tiles.rows - 1) // tiles.rows, step, first)
