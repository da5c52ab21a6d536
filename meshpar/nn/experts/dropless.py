"""Dropless dispatch: every token reaches all of its experts, as rows sorted by expert.

Shapes: T tokens, K experts of a token, D embed, E experts, N rows.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meshpar.mesh.varying import Axes
from meshpar.nn.experts.exchange import Devices, Exchange, Plan, selected, send
from meshpar.nn.experts.mlp import ExpertWeights
from meshpar.nn.experts.sorting import Size, counts, rows_of, sort, summed
from meshpar.nn.experts.tiles import of_choices


def dropless(
    x_TD: Float[Array, "T D"], ids_TK: Int[Array, "T K"], weights_TK: Float[Array, "T K"], experts: ExpertWeights,
    axes: Axes = (),
) -> Float[Array, "T D"]:  # fmt: skip
    """The weighted sum of the results of each token's experts.

    Args:
      experts: the weights of this device's experts.
      axes: over which experts are sharded; empty if this device has all of them.

    Communication: none on one device; see `_sent`, `_gathered` and `_by_groups` for several.
    Memory: N rows of the width of the residual stream, and twice of the experts' hidden layer. N = T K on one device;
      on n devices n T min(K, E/n), because a router may send the tokens of all devices to one.
    """
    weights_TK = weights_TK.astype(x_TD.dtype)
    if not axes:
        return _of_own(x_TD, ids_TK, weights_TK, experts, ids_TK.size)
    chosen = selected()
    devices = Devices.along(axes)
    if chosen.kind == "hierarchical":
        return _by_groups(x_TD, ids_TK, weights_TK, experts, *devices.divided(chosen.group or 1))
    exchange = {"ragged": _sent, "gather": _gathered}[chosen.kind]
    return exchange(x_TD, ids_TK, weights_TK, experts, devices)


def _of_own(
    x_TD: Float[Array, "T D"], ids_TK: Int[Array, "T K"], weights_TK: Float[Array, "T K"], experts: ExpertWeights,
    expected: Size,
) -> Float[Array, "T D"]:  # fmt: skip
    """The weighted sum of the results of this device's experts. Other experts contribute 0.

    Args:
      ids_TK: the experts of each token, counted from this device's first.
      expected: the number of choices of this device's experts, if the router is balanced; see `of_choices`.
    """
    num = experts.num
    is_own = (ids_TK >= 0) & (ids_TK < num)
    order = sort(jnp.where(is_own, ids_TK, num), x_TD.shape[0] * min(ids_TK.shape[1], num))
    return of_choices(x_TD, weights_TK, order, counts(ids_TK, num), experts, expected)


def _gathered(
    x_TD: Float[Array, "T D"], ids_TK: Int[Array, "T K"], weights_TK: Float[Array, "T K"], experts: ExpertWeights,
    devices: Devices,
) -> Float[Array, "T D"]:  # fmt: skip
    """Each device gathers the tokens of all n devices, and computes the choices of its experts; sums are scattered.

    Communication: forward n-1 times x and the ids and weights to gather, n-1 times x to scatter; backward n-1 times x
      twice, and the weights.
    """
    expected = ids_TK.size
    axes = devices.axes
    x_TD, ids_TK, weights_TK = (lax.all_gather(x, axes, tiled=True) for x in (x_TD, ids_TK, weights_TK))
    own_TK = ids_TK - devices.index * experts.num
    return lax.psum_scatter(_of_own(x_TD, own_TK, weights_TK, experts, expected), axes, tiled=True)


def _sent(
    x_TD: Float[Array, "T D"], ids_TK: Int[Array, "T K"], weights_TK: Float[Array, "T K"], experts: ExpertWeights,
    devices: Devices, expected: int | None = None,
) -> Float[Array, "T D"]:  # fmt: skip
    """Rows travel to the devices of their experts and back, see `Exchange`. Other experts contribute 0.

    Args:
      expected: the number of choices of a device's experts, if the router is balanced. Default: T K.
    """
    num, per_token = ids_TK.shape
    exchange = Exchange(devices, experts.num)
    is_own = (ids_TK >= 0) & (ids_TK < exchange.num_experts)
    order = sort(jnp.where(is_own, ids_TK, exchange.num_experts), num * min(per_token, exchange.num_experts))

    def compute(rows: Array, ids: Array) -> Array:
        weights = jnp.ones((len(rows), 1), rows.dtype)
        return _of_own(rows, ids[:, None], weights, experts, ids_TK.size if expected is None else expected)

    sizes_E = counts(ids_TK, exchange.num_experts)
    longest = num * min(per_token, exchange.per_device)
    results_ND = exchange.apply(compute, rows_of(x_TD, order), sizes_E, longest)
    return summed(results_ND, weights_TK, order)


def _by_groups(
    x_TD: Float[Array, "T D"], ids_TK: Int[Array, "T K"], weights_TK: Float[Array, "T K"], experts: ExpertWeights,
    inside: Devices, across: Devices,
) -> Float[Array, "T D"]:  # fmt: skip
    """Sends a token once to each group that has any of its experts, and inside the group to their devices.

    Sums travel back the same way. With k groups of g devices, a device sends rows across to the devices with its own
    place in the other groups.

    Communication: across, min(K, k)/K at most of what `_sent` sends across; inside, (g-1)/g of the rows.
    Source: Rajbhandari et al. 2022, arXiv:2201.05596 (hierarchical all-to-all); DeepSeek-AI 2024, arXiv:2412.19437
      (a token crosses to a node once).
    """
    num, per_token = ids_TK.shape
    per_group = inside.size * experts.num
    groups_TK = ids_TK // per_group
    earlier = jnp.tril(jnp.ones((per_token, per_token), bool), -1)
    is_again = ((groups_TK[:, :, None] == groups_TK[:, None, :]) & earlier).any(-1)
    groups_TK = jnp.where(is_again, across.size, groups_TK)
    order = sort(groups_TK, num * min(per_token, across.size))
    there = Plan(across.gather(counts(groups_TK, across.size)), across)
    room = num * across.size
    x_MD = send(rows_of(x_TD, order), there, room)
    weights_MK = send(rows_of(weights_TK, order), there, room)
    # Rows that nobody sent have id 0: no expert.
    ids_MK = send(ids_TK[order.tokens] + 1, there, room) - 1
    y_MD = _sent(x_MD, ids_MK - across.index * per_group, weights_MK, experts, inside, ids_TK.size)
    y_ND = send(y_MD, there.back, len(order.choices))
    return summed(y_ND, jnp.ones_like(weights_TK), order)
