"""Dispatch by capacity: each expert has a fixed number of places for the tokens of a row.

First choices of all tokens of a row get places before second choices, and early tokens before late ones. A choice
without a place is dropped: its expert contributes nothing to the token.

Shapes: B batch, S seq, K experts of a token, E experts, P places of an expert, D embed.

Source: Lepikhin et al. 2020, arXiv:2006.16668 (GShard). Its groups of tokens are rows here.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from meshpar.mesh.varying import Axes
from meshpar.nn.experts.mlp import ExpertWeights

Apply = Callable[[jax.Array], jax.Array]
"""[batch, experts, places, embed] -> the results of the same shape."""


def by_capacity(
    x_BSD: Float[Array, "B S D"], ids_BSK: Int[Array, "B S K"], weights_BSK: Float[Array, "B S K"], apply: Apply,
    num_experts: int, places: int,
) -> tuple[Float[Array, "B S D"], Bool[Array, "B S K"]]:  # fmt: skip
    """The weighted sum of the results of each token's experts, and which choices got a place.

    Memory: E P rows for each row of the batch.
    """
    slots_BSK, is_kept_BSK = _slots(ids_BSK, num_experts, places)
    nobody = num_experts * places
    results_BND = apply(_placed(x_BSD, slots_BSK, nobody).reshape(len(x_BSD), num_experts, places, -1))
    results_BND = _with_zero_row(results_BND.reshape(len(x_BSD), nobody, -1))
    flat = slots_BSK.reshape(len(x_BSD), -1)
    results = jnp.take_along_axis(results_BND, flat[..., None], axis=1).reshape(*slots_BSK.shape, -1)
    return jnp.einsum("bskd,bsk->bsd", results, weights_BSK.astype(x_BSD.dtype)), is_kept_BSK


def _slots(
    ids_BSK: Int[Array, "B S K"], num_experts: int, places: int
) -> tuple[Int[Array, "B S K"], Bool[Array, "B S K"]]:
    """The index of each choice's place among the E P places of all experts, E P without one; and whether it has one."""
    batch, seq, per_token = ids_BSK.shape
    ids_BN = ids_BSK.swapaxes(1, 2).reshape(batch, -1)  # first choices first
    is_choice_BNE = jax.nn.one_hot(ids_BN, num_experts, dtype=jnp.int32)
    before_BN = (jnp.cumsum(is_choice_BNE, axis=1, dtype=jnp.int32) * is_choice_BNE).sum(-1, dtype=jnp.int32) - 1
    before = before_BN.reshape(batch, per_token, seq).swapaxes(1, 2)
    is_kept = before < places
    return jnp.where(is_kept, ids_BSK * places + before, num_experts * places), is_kept


def _placed(x_BSD: Float[Array, "B S D"], slots_BSK: Int[Array, "B S K"], num: int) -> Float[Array, "B N D"]:
    """[batch, num, embed]: the token in each place, zeros in empty ones."""
    batch, seq, per_token = slots_BSK.shape
    tokens = jnp.arange(seq * per_token, dtype=jnp.int32) // per_token
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    # The extra place collects the dropped choices.
    table = jnp.full((batch, num + 1), seq, jnp.int32).at[rows, slots_BSK.reshape(batch, -1)].set(tokens)
    return jnp.take_along_axis(_with_zero_row(x_BSD), table[:, :num, None], axis=1)


def _with_zero_row(x_BND: Float[Array, "B N D"]) -> Float[Array, "B N+1 D"]:
    return jnp.pad(x_BND, ((0, 0), (0, 1), (0, 0)))


def of_places(weights: ExpertWeights, x_BEPD: Float[Array, "B E P D"], axes: Axes) -> Float[Array, "B E P D"]:
    """The results of all places: `x[B, E, P, D] -> x[B n, E_a, P, D] -> y[B n, E_a, P, D] -> y[B, E, P, D]`.

    Args:
      weights: of the experts on this device.
      axes: over which experts are sharded; empty if the device has all of them.

    Communication: two all-to-alls of x, each (n-1)/n of its bytes; backward two more.
    """
    if not axes:
        return weights.swiglu(x_BEPD, _dot)
    x_BEPD = lax.all_to_all(x_BEPD, axes, split_axis=1, concat_axis=0, tiled=True)
    y_BEPD = weights.swiglu(x_BEPD, _dot)
    return lax.all_to_all(y_BEPD, axes, split_axis=0, concat_axis=1, tiled=True)


def _dot(x_BEPI: jax.Array, w_EIO: jax.Array) -> jax.Array:
    return jnp.einsum("bepi,eio->bepo", x_BEPI, w_EIO)
