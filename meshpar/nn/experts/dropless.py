"""Dropless dispatch: every token reaches all of its experts, as rows sorted by expert.

Shapes: T tokens, K experts of a token, D embed, E experts, N rows.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshpar.nn.experts.exchange import Exchange
from meshpar.nn.experts.mlp import ExpertWeights


def dropless(
    x_TD: Float[Array, "T D"], ids_TK: Int[Array, "T K"], weights_TK: Float[Array, "T K"], experts: ExpertWeights,
    num_experts: int, exchange: Exchange | None = None,
) -> Float[Array, "T D"]:  # fmt: skip
    """The weighted sum of the results of each token's experts.

    Args:
      experts: those on this device.
      num_experts: those on all devices of the exchange.
      exchange: sends rows to the devices of their experts; None if this device has all experts.

    Communication: that of the exchange, there and back.
    Memory: N rows of the width of the residual stream, and of the experts' hidden layer. N = T K on one device; see
      `Exchange` for several.
    """
    num, per_token = ids_TK.shape
    order_N = jnp.argsort(ids_TK.reshape(-1), stable=True).astype(jnp.int32)
    sizes_E = jnp.bincount(ids_TK.reshape(-1), length=num_experts).astype(jnp.int32)
    rows_ND = x_TD[order_N // per_token]
    compute = partial(experts.of_sorted, expected=num * per_token)
    if exchange is None:
        results_ND = compute(rows_ND, sizes_E)
    else:
        results_ND = exchange.apply(compute, rows_ND, sizes_E, num * min(per_token, exchange.per_device))
    results_TKD = results_ND[inverse(order_N)].reshape(num, per_token, -1)
    return jnp.einsum("tkd,tk->td", results_TKD, weights_TK.astype(x_TD.dtype))


def inverse(order: Int[Array, "N"]) -> Int[Array, "N"]:
    """The permutation that undoes `order`."""
    return jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype), unique_indices=True)
