"""Dropless dispatch: every token reaches all of its experts, as rows sorted by expert.

Shapes: T tokens, K experts of a token, D embed, E experts, N rows.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meshpar.mesh.varying import Axes
from meshpar.nn.experts.exchange import Exchange, selected
from meshpar.nn.experts.mlp import ExpertWeights
from meshpar.nn.experts.sorting import counts, rows_of, sort, summed


def dropless(
    x_TD: Float[Array, "T D"], ids_TK: Int[Array, "T K"], weights_TK: Float[Array, "T K"], experts: ExpertWeights,
    axes: Axes = (),
) -> Float[Array, "T D"]:  # fmt: skip
    """The weighted sum of the results of each token's experts.

    Args:
      experts: those on this device.
      axes: over which experts are sharded; empty if this device has all of them.

    Communication: none on one device; see `_sent` and `_gathered` for several.
    Memory: N rows of the width of the residual stream, and of the experts' hidden layer. N = T K on one device; on n
      devices n T min(K, E/n), because a router may send the tokens of all to one.
    """
    weights_TK = weights_TK.astype(x_TD.dtype)
    if not axes:
        return _of_own(x_TD, ids_TK, weights_TK, experts, ids_TK.size)
    exchange = {"ragged": _sent, "gather": _gathered}[selected()]
    return exchange(x_TD, ids_TK, weights_TK, experts, axes)


def _of_own(
    x_TD: Float[Array, "T D"], ids_TK: Int[Array, "T K"], weights_TK: Float[Array, "T K"], experts: ExpertWeights,
    expected: int,
) -> Float[Array, "T D"]:  # fmt: skip
    """The weighted sum of the results of this device's experts, which are counted from 0; of all others it is 0.

    Args:
      expected: the number of choices of this device's experts, if the router is balanced.
    """
    num = len(experts.gate)
    is_own = (ids_TK >= 0) & (ids_TK < num)
    order = sort(jnp.where(is_own, ids_TK, num), len(x_TD) * min(ids_TK.shape[1], num))
    results_ND = experts.of_sorted(rows_of(x_TD, order), counts(ids_TK, num), expected)
    return summed(results_ND, weights_TK, order)


def _gathered(
    x_TD: Float[Array, "T D"], ids_TK: Int[Array, "T K"], weights_TK: Float[Array, "T K"], experts: ExpertWeights,
    axes: Axes,
) -> Float[Array, "T D"]:  # fmt: skip
    """Each device gathers the tokens of all n, and computes the choices of its experts; the sums are scattered.

    Communication: forward n-1 times x and the ids and weights to gather, n-1 times x to scatter; backward n-1 times x
      twice, and the weights.
    """
    expected = ids_TK.size
    x_TD, ids_TK, weights_TK = (lax.all_gather(x, axes, tiled=True) for x in (x_TD, ids_TK, weights_TK))
    own_TK = ids_TK - lax.axis_index(axes) * len(experts.gate)
    return lax.psum_scatter(_of_own(x_TD, own_TK, weights_TK, experts, expected), axes, tiled=True)


def _sent(
    x_TD: Float[Array, "T D"], ids_TK: Int[Array, "T K"], weights_TK: Float[Array, "T K"], experts: ExpertWeights,
    axes: Axes,
) -> Float[Array, "T D"]:  # fmt: skip
    """Rows travel to the devices of their experts and back, see `Exchange`."""
    num, per_token = ids_TK.shape
    exchange = Exchange(axes, len(experts.gate))
    order = sort(ids_TK, ids_TK.size)

    def compute(rows: Array, sizes: Array) -> Array:
        return experts.of_sorted(rows, sizes, expected=ids_TK.size)

    sizes_E = counts(ids_TK, exchange.num_experts)
    longest = num * min(per_token, exchange.per_device)
    results_ND = exchange.apply(compute, rows_of(x_TD, order), sizes_E, longest)
    return summed(results_ND, weights_TK, order)
