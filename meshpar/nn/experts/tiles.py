"""Computes the results of experts in tiles of rows, for choices that are sorted by expert.

`lax.ragged_dot` multiplies every row with the matrix of every expert where the compiler has no kernel for it: on CPUs
and GPUs, and on TPUs for the gradient of the matrices. Here a loop multiplies the rows of an expert, tile by tile. So
on every backend the FLOPs depend on the rows that arrived, not on the size of the buffer that holds them.

A tile reads the tokens of its rows, and the backward computes all gradients of a tile at once. So few arrays need room
for the worst case: gate, up and the results in the forward, the gradients of the rows' tokens in the backward. The
gradient of a choice's weight is the product of its hidden layer and that layer's gradient, so no result is saved.

Shapes: T tokens, K experts of a token, N rows with room for one more tile, R rows of a tile, E experts of this device,
D embed, M mlp.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from meshpar.mesh.varying import varying_alike, varying_like
from meshpar.nn.experts.mlp import ExpertWeights
from meshpar.nn.experts.sorting import Order, Size, no_gradient, read, rows_of, summed
from meshpar.nn.layers import silu_product
from meshpar.nn.remat import named
from meshpar.parallel.context import current
from meshpar.parallel.precision import wide, wide_dtype
from meshpar.parallel.scopes import needed, runs

SMALLEST = 64
LARGEST = 512
"""Bounds of the rows of a tile. On CPUs tiles of 16 rows take longer than tiles of 64, though they multiply fewer."""


Arrays = tuple[jax.Array, ...]
"""Arrays [N, ...]."""
Sums = Any
"""Sums over the rows of an expert; () for none."""


class Tiles(NamedTuple):
    """How many rows a tile has, and how many tiles each expert has if the router is balanced."""

    rows: int
    per_expert: int

    @classmethod
    def of(cls, num_rows: int, experts: int, expected: int) -> Tiles:
        """The largest tiles that multiply at most a tenth more rows than `expected`, within the bounds.

        >>> Tiles.of(num_rows=196608, experts=8, expected=24576)
        Tiles(rows=256, per_expert=12)
        """
        tenth = max(1, expected // (10 * experts))
        rows = min(num_rows, LARGEST, max(SMALLEST, 2 ** (tenth.bit_length() - 1)))
        return cls(rows, -(-expected // (experts * rows)))


class Rows(NamedTuple):
    """The token of each row and its weight, with room for a tile that begins at the last row.

    Args:
      tokens: int32 [N].
      weights: [N].
    """

    tokens: jax.Array
    weights: jax.Array

    @classmethod
    def of(cls, order: Order, weights_TK: jax.Array, tiles: Tiles) -> Rows:
        choices = jnp.pad(order.choices, (0, tiles.rows))
        return cls(choices // weights_TK.shape[1], weights_TK.reshape(-1)[choices])

    def room(self, like: jax.Array, *rest: int) -> Float[Array, "N *rest"]:
        """Zeros with the dtype of `like`."""
        return varying_like(jnp.zeros((*self.tokens.shape, *rest), like.dtype), like)


class Tile(NamedTuple):
    """Consecutive rows. The first belong to one expert. It writes zeros to the others, which the next one overwrites.

    Args:
      row: int32, the first row.
      is_own: bool [R].
    """

    row: jax.Array
    is_own: jax.Array

    def cut(self, x_N: Shaped[Array, "N *rest"]) -> Shaped[Array, "R *rest"]:
        return lax.dynamic_slice_in_dim(x_N, self.row, len(self.is_own))

    def put(self, x_N: Shaped[Array, "N *rest"], x_R: Shaped[Array, "R *rest"]) -> Shaped[Array, "N *rest"]:
        return lax.dynamic_update_slice_in_dim(x_N, x_R, self.row, axis=0)

    def weights(self, rows: Rows) -> Float[Array, "R 1"]:
        """The weights of the rows, 0 for others than the expert's own."""
        weights_R = self.cut(rows.weights)
        return jnp.where(self.is_own, weights_R, jnp.zeros((), weights_R.dtype))[:, None]


def of_choices(
    x_TD: Float[Array, "T D"], weights_TK: Float[Array, "T K"], order: Order, sizes_E: Int[Array, "E"],
    experts: ExpertWeights, expected: Size,
) -> Float[Array, "T D"]:  # fmt: skip
    """The weighted sum of the results of each token's experts; choices beyond the last expert's rows contribute 0.

    Under GSPMD arrays are whole, and products are `lax.ragged_dot`, which XLA can partition.

    Args:
      order: of the choices, by expert.
      sizes_E: int32, the number of rows of each expert.
      expected: the number of rows of all experts, if the router is balanced. The cost model counts FLOPs with it. If it
        is symbolic, tiles have the smallest size, and no FLOPs are counted.

    Numerics: the gradients of matrices are summed over tiles in float32 at least.
    Memory: see the top of this file; without `remat` gate and up are saved.
    """
    ctx = current()
    if ctx is not None and not ctx.is_local:
        return _by_xla(x_TD, weights_TK, order, sizes_E, experts)
    leaves, structure = jax.tree.flatten((x_TD, weights_TK, order, sizes_E, experts))
    operands = jax.tree.unflatten(structure, varying_alike(*leaves))
    if not isinstance(expected, int):
        return _in_tiles(Tiles(SMALLEST, per_expert=1), *operands)
    tiles = Tiles.of(len(order.choices), experts.num, expected)
    with needed(Fraction(expected, experts.num * tiles.per_expert * tiles.rows)):
        return _in_tiles(tiles, *operands)


def _by_xla(
    x_TD: jax.Array, weights_TK: jax.Array, order: Order, sizes_E: jax.Array, experts: ExpertWeights
) -> jax.Array:
    def dot(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.ragged_dot(x, w, sizes_E)

    return summed(experts.swiglu(rows_of(x_TD, order), dot), weights_TK, order)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_tiles(
    tiles: Tiles, x_TD: jax.Array, weights_TK: jax.Array, order: Order, sizes_E: jax.Array, experts: ExpertWeights
) -> jax.Array:
    return _forward(tiles, x_TD, weights_TK, order, sizes_E, experts)[0]


def _forward(
    tiles: Tiles, x_TD: jax.Array, weights_TK: jax.Array, order: Order, sizes_E: jax.Array, experts: ExpertWeights
) -> tuple[jax.Array, Any]:
    """Gate and up have a loop of their own, so that remat can recompute either loop alone."""
    rows = Rows.of(order, weights_TK, tiles)

    def project(saved: Arrays, _: Sums, tile: Tile, expert: ExpertWeights) -> tuple[Arrays, Sums]:
        x_RD = x_TD[tile.cut(rows.tokens)]
        gate, up = saved
        gate_RM = expert.gate.product(x_RD, jnp.matmul)
        up_RM = expert.up.product(x_RD, jnp.matmul)
        return (tile.put(gate, gate_RM), tile.put(up, up_RM)), ()

    hidden = (rows.room(x_TD, experts.gate.kernel.shape[2]),) * 2
    gate_NM, up_NM = _over_tiles(project, hidden, (), sizes_E, experts, tiles)[0]
    gate_NM = named(gate_NM, "gate")
    up_NM = named(up_NM, "up")

    def combine(results: Arrays, _: Sums, tile: Tile, expert: ExpertWeights) -> tuple[Arrays, Sums]:
        hidden_RM = silu_product(tile.cut(gate_NM), tile.cut(up_NM)) * tile.weights(rows)
        return (tile.put(results[0], expert.down.product(hidden_RM, jnp.matmul)),), ()

    results = (rows.room(x_TD, x_TD.shape[1]),)
    (results_ND,) = _over_tiles(combine, results, (), sizes_E, experts, tiles)[0]
    return read(results_ND, order.places).sum(1), (x_TD, weights_TK, order, sizes_E, experts, gate_NM, up_NM)


def _backward(tiles: Tiles, saved: Any, dy_TD: jax.Array) -> tuple[Any, ...]:
    x_TD, weights_TK, order, sizes_E, experts, gate_NM, up_NM = saved
    rows = Rows.of(order, weights_TK, tiles)

    def pull(grads: Arrays, sums: Sums, tile: Tile, expert: ExpertWeights) -> tuple[Arrays, Sums]:
        dx_ND, dweights_N = grads
        tokens = tile.cut(rows.tokens)
        weights_R1 = tile.weights(rows)
        hidden_RM, pull_hidden = jax.vjp(silu_product, tile.cut(gate_NM), tile.cut(up_NM))
        dhidden_RM, ddown = expert.down.gradients(hidden_RM * weights_R1, dy_TD[tokens])
        dgate_RM, dup_RM = pull_hidden(dhidden_RM * weights_R1)
        dx_RD, dgate = expert.gate.gradients(x_TD[tokens], dgate_RM)
        dx_of_up_RD, dup = expert.up.gradients(x_TD[tokens], dup_RM)
        dweights_R = (wide(dhidden_RM) * wide(hidden_RM)).sum(1).astype(dweights_N.dtype)
        dweights_R = jnp.where(tile.is_own, dweights_R, jnp.zeros_like(dweights_R))
        grads = tile.put(dx_ND, dx_RD + dx_of_up_RD), tile.put(dweights_N, dweights_R)
        return grads, jax.tree.map(jnp.add, sums, ExpertWeights(dgate, dup, ddown))

    room = rows.room(x_TD, x_TD.shape[1]), rows.room(weights_TK)
    zeros = jax.tree.map(lambda w: varying_like(jnp.zeros(w.shape[1:], wide_dtype(w.dtype)), w), experts)
    (dx_ND, dweights_N), sums = _over_tiles(pull, room, zeros, sizes_E, experts, tiles)
    dx_TD = read(dx_ND, order.places).sum(1)
    dexperts = jax.tree.map(lambda w, total: total.astype(w.dtype), experts, sums)
    return dx_TD, read(dweights_N, order.places), *no_gradient((order, sizes_E)), dexperts


_in_tiles.defvjp(_forward, _backward)


def _over_tiles(
    add: Callable[[Arrays, Sums, Tile, ExpertWeights], tuple[Arrays, Sums]],
    arrays: Arrays, zeros: Sums, sizes_E: jax.Array, experts: ExpertWeights, tiles: Tiles,
) -> tuple[Arrays, Sums]:  # fmt: skip
    """`arrays, sums = add(arrays, sums, tile, expert)` for each tile of each expert, in order.

    Returns:
      The arrays, and the sums of each expert: [E, ...].
    """

    def of_expert(arrays: Arrays, span: tuple[ExpertWeights, jax.Array, jax.Array]) -> tuple[Arrays, Sums]:
        expert, start, end = span

        def step(i: jax.Array, carry: tuple[Arrays, Sums]) -> tuple[Arrays, Sums]:
            row = start + i * tiles.rows
            return add(*carry, Tile(row, row + jnp.arange(tiles.rows, dtype=jnp.int32) < end), expert)

        with runs(tiles.per_expert):
            return lax.fori_loop(0, (end - start + tiles.rows - 1) // tiles.rows, step, (arrays, zeros))

    ends = jnp.cumsum(sizes_E, dtype=jnp.int32)
    return lax.scan(of_expert, arrays, (experts, ends - sizes_E, ends))
