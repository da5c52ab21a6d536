"""Sorts the choices of tokens by expert, and sums the results of each token's choices.

A choice is one of the K experts of one of T tokens. Row n of a sorted array belongs to choice `choices[n]`, and choice
[t, k] has row `places[t, k]`. With both permutations neither pass scatters rows: the transpose of reading rows by one
is reading them by the other.

Shapes: T tokens, K experts of a token, N rows, D embed, E experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from meshpar.mesh.varying import varying_alike

Size = Any
"""An int, or a symbolic dim of a program that is exported for any number of tokens."""


class Order(NamedTuple):
    """The order of the rows.

    Args:
      choices: int32 [N], the choice of each row, counted over [T, K].
      places: int32 [T, K], the row of each choice; at least N if it has none.
    """

    choices: jax.Array
    places: jax.Array

    @property
    def tokens(self) -> Int[Array, "N"]:
        """The token of each row."""
        return self.choices // self.places.shape[1]


def sort(ids_TK: Int[Array, "T K"], num_rows: Size) -> Order:
    """Sorts choices by expert, then by token. Choices after the first `num_rows` have no row."""
    choices = jnp.argsort(ids_TK.reshape(-1), stable=True).astype(jnp.int32)
    rows = jnp.arange(choices.shape[0], dtype=jnp.int32)
    places = jnp.zeros_like(choices).at[choices].set(rows, unique_indices=True)
    return Order(choices[:num_rows], places.reshape(ids_TK.shape))


def counts(ids_TK: Int[Array, "T K"], num: int) -> Int[Array, "E"]:
    """How many choices each of the experts 0 to num - 1 has."""
    return (ids_TK[..., None] == jnp.arange(num, dtype=jnp.int32)).sum((0, 1), dtype=jnp.int32)


def rows_of(x_TD: Float[Array, "T D"], order: Order) -> Float[Array, "N D"]:
    """Reads the token of each row."""
    return _rows_of(*varying_alike(x_TD, *order))


def summed(rows_ND: Float[Array, "N D"], weights_TK: Float[Array, "T K"], order: Order) -> Float[Array, "T D"]:
    """The weighted sum of the rows of each token's choices."""
    return _summed(*varying_alike(rows_ND, weights_TK, *order))


@jax.custom_vjp
def _rows_of(x_TD: jax.Array, choices: jax.Array, places: jax.Array) -> jax.Array:
    return x_TD[Order(choices, places).tokens]


def _rows_backward(order: Order, drows_ND: jax.Array) -> tuple[jax.Array | np.ndarray, ...]:
    return read(drows_ND, order.places).sum(1), *no_gradient(order)


_rows_of.defvjp(lambda x, *order: (_rows_of(x, *order), Order(*order)), _rows_backward)


@jax.custom_vjp
def _summed(rows_ND: jax.Array, weights_TK: jax.Array, choices: jax.Array, places: jax.Array) -> jax.Array:
    return jnp.einsum("tkd,tk->td", read(rows_ND, places), weights_TK)


def _sum_backward(saved: tuple[jax.Array, jax.Array, Order], dy_TD: jax.Array) -> tuple[jax.Array | np.ndarray, ...]:
    rows_ND, weights_TK, order = saved
    drows_ND = dy_TD[order.tokens] * weights_TK.reshape(-1)[order.choices][:, None]
    dweights_TK = jnp.einsum("tkd,td->tk", read(rows_ND, order.places), dy_TD)
    return drows_ND, dweights_TK, *no_gradient(order)


_summed.defvjp(
    lambda rows, weights, *order: (_summed(rows, weights, *order), (rows, weights, Order(*order))), _sum_backward
)


def read(rows_ND: Shaped[Array, "N *rest"], places_TK: Int[Array, "T K"]) -> Shaped[Array, "T K *rest"]:
    """The row of each choice; 0 for choices without a row."""
    return rows_ND.at[places_TK].get(mode="fill", fill_value=0)


def no_gradient(integers: Any) -> Any:
    """The gradients of a tree of integers."""
    return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), integers)
