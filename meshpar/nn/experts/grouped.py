"""Products of rows, sorted by group, with matrices of each group: the experts' matrix products.

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
from typing import Any, NamedTuple

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


Rows = tuple[jax.Array, ...]
Matrices = tuple[jax.Array, ...]
OfRows = Callable[..., jax.Array]
"""(arrays [N, ...]) -> [N, K]"""


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


def grouped_dots(
    rows: Rows, ws_GKM: Matrices, sizes_G: Int[Array, "G"], expected: int, of_rows: OfRows
) -> tuple[Float[Array, "N _"], ...]:
    """`x[n] @ w[g]` for each w, where `x = of_rows(*rows)` and g is the group of row n; 0 beyond the last group's rows.

    x is computed for each tile, forward and backward: for as many rows as arrived, and it is never stored.
    Under GSPMD arrays are whole, and it is `lax.ragged_dot`, which XLA can partition.

    Args:
      rows: arrays [N, ...].
      ws_GKM: one or several [G, K, M], whose M may differ.
      sizes_G: int32, the number of rows of each group.
      expected: the number of rows of all groups, if the router is balanced. Programs are counted with it.
      of_rows: a function of each row by itself.

    Numerics: the gradient of w is summed over tiles in float32 at least.
    """
    ctx = current()
    if ctx is not None and not ctx.is_local:
        return tuple(lax.ragged_dot(of_rows(*rows), w, sizes_G) for w in ws_GKM)
    tiles = Tiles.of(len(rows[0]), len(sizes_G), expected)
    operands = varying_alike(sizes_G, *rows, *ws_GKM)
    with needed(Fraction(expected, len(sizes_G) * tiles.per_group * tiles.rows)):
        return _dots(of_rows, tiles, operands[0], operands[1 : 1 + len(rows)], operands[1 + len(rows) :])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _dots(of_rows: OfRows, tiles: Tiles, sizes_G: jax.Array, rows: Rows, ws: Matrices) -> Rows:
    def of_group(ys: Rows, group: tuple[Matrices, jax.Array, jax.Array]) -> tuple[Rows, None]:
        ws, start, size = group

        def add(ys: Rows, row: jax.Array, is_own_T1: jax.Array) -> Rows:
            x = of_rows(*(_tile(one, row, tiles) for one in rows))
            return tuple(_put(y, x @ w, row, is_own_T1) for y, w in zip(ys, ws, strict=True))

        return _over_tiles(add, ys, start, size, len(rows[0]), tiles), None

    ys = tuple(_zeros((len(rows[0]), w.shape[2]), w.dtype, w) for w in ws)
    return lax.scan(of_group, ys, (ws, *_spans(sizes_G)))[0]


def _backward(
    of_rows: OfRows, tiles: Tiles, saved: tuple[jax.Array, Rows, Matrices], dys: Rows
) -> tuple[np.ndarray, Rows, Matrices]:
    sizes_G, rows, ws = saved
    dtype = wide_dtype(ws[0].dtype)

    def of_group(drows: Rows, group: tuple[Matrices, jax.Array, jax.Array]) -> tuple[Rows, Matrices]:
        ws, start, size = group

        def add(carry: tuple[Rows, Matrices], row: jax.Array, is_own_T1: jax.Array) -> tuple[Rows, Matrices]:
            drows, dws = carry
            x, pull = jax.vjp(of_rows, *(_tile(one, row, tiles) for one in rows))
            dy_tiles = [_tile(dy, row, tiles) for dy in dys]
            dx = sum(jnp.einsum("tm,km->tk", dy, w) for dy, w in zip(dy_tiles, ws, strict=True))
            drows = tuple(_put(old, tile, row, is_own_T1) for old, tile in zip(drows, pull(dx), strict=True))
            x = jnp.where(is_own_T1, x, jnp.zeros((), x.dtype))
            products = [jnp.einsum("tk,tm->km", x, dy, preferred_element_type=dtype) for dy in dy_tiles]
            return drows, tuple(dw + product for dw, product in zip(dws, products, strict=True))

        zeros = tuple(_zeros(w.shape, dtype, w) for w in ws)
        return _over_tiles(add, (drows, zeros), start, size, len(rows[0]), tiles)

    zeros = tuple(_zeros(one.shape, one.dtype, one) for one in rows)
    drows, dws = lax.scan(of_group, zeros, (ws, *_spans(sizes_G)))
    no_gradient = np.zeros(sizes_G.shape, jax.dtypes.float0)
    return no_gradient, drows, tuple(dw.astype(w.dtype) for dw, w in zip(dws, ws, strict=True))


_dots.defvjp(lambda of_rows, tiles, *operands: (_dots(of_rows, tiles, *operands), operands), _backward)


def _zeros(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.Array:
    return varying_like(jnp.zeros(shape, dtype), like)


def _spans(sizes_G: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first row of each group, and its number of rows."""
    return jnp.cumsum(sizes_G, dtype=jnp.int32) - sizes_G, sizes_G


def _tile(x_ND: jax.Array, row: jax.Array, tiles: Tiles) -> jax.Array:
    return lax.dynamic_slice_in_dim(x_ND, row, tiles.rows)


def _put(x_ND: jax.Array, tile: jax.Array, row: jax.Array, is_own_T1: jax.Array) -> jax.Array:
    """Writes the rows of a tile that are of its group."""
    old = lax.dynamic_slice_in_dim(x_ND, row, len(tile))
    return lax.dynamic_update_slice_in_dim(x_ND, jnp.where(is_own_T1, tile, old), row, axis=0)


def _over_tiles(
    add: Callable[[Any, jax.Array, jax.Array], Any],
    first: Any, start: jax.Array, size: jax.Array, num_rows: int, tiles: Tiles,
) -> Any:  # fmt: skip
    """`carry = add(carry, row, is_own)` for each tile of a group.

    A tile that would end beyond the array begins earlier, so not all of its rows are its own.
    """

    def step(i: jax.Array, carry: Any) -> Any:
        own = start + i * tiles.rows
        row = jnp.minimum(own, num_rows - tiles.rows)
        rows = row + jnp.arange(tiles.rows, dtype=jnp.int32)
        return add(carry, row, ((rows >= own) & (rows < start + size))[:, None])

    with runs(tiles.per_group):
        return lax.fori_loop(0, (size + tiles.rows - 1) // tiles.rows, step, first)
