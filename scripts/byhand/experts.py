"""A mixture of experts in place of the MLP, forward and backward, on local shards.

Each device gathers the tokens of the devices along `axes.expert`, computes those of its experts, and scatters the sums:
simulated devices have no ragged all-to-all. Rows are sorted by expert, and multiplied in tiles, as many as there are.

Shapes: T tokens of a device, A of all devices along `expert`, K experts of a token, N rows, R rows of a tile, D embed,
M mlp, E experts of this device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from byhand.axes import Axes

TILE = 64


class Saved(NamedTuple):
    """Values for the backward: probabilities [T, all experts], and arrays of all devices' tokens and of the rows."""

    probabilities: jax.Array
    ids: jax.Array
    x: jax.Array
    weights: jax.Array
    tokens: jax.Array
    choices: jax.Array
    places: jax.Array
    sizes: jax.Array
    gate_up: jax.Array


def forward(axes: Axes, w: dict[str, jax.Array], x: jax.Array, per_token: int) -> tuple[jax.Array, Saved]:
    """x [B, S, D] -> the same."""
    x_TD = x.reshape(-1, x.shape[-1])
    probabilities = jax.nn.softmax(x_TD @ w["router"])
    best, ids_TK = lax.top_k(probabilities, per_token)
    weights_TK = best / best.sum(-1, keepdims=True)
    x_AD, ids_AK, weights_AK = (axes.gather_tokens(y) for y in (x_TD, ids_TK, weights_TK))
    num = w["down"].shape[0]
    own_AK = ids_AK - axes.first_expert(num)
    own_AK = jnp.where((own_AK >= 0) & (own_AK < num), own_AK, num)
    choices = jnp.argsort(own_AK.reshape(-1), stable=True)
    places = jnp.zeros_like(choices).at[choices].set(jnp.arange(choices.size), unique_indices=True)
    num_rows = len(x_AD) * min(per_token, num)
    tokens = choices[:num_rows] // per_token
    sizes = (own_AK.reshape(-1, 1) == jnp.arange(num)).sum(0)
    gate_up = jnp.zeros((num_rows, w["gate_up"].shape[2]), x.dtype)
    results = jnp.zeros((num_rows, x.shape[2]), x.dtype)

    def compute(expert: int, row: jax.Array, is_own: jax.Array, carry: Any) -> Any:
        gate_up, results = carry
        new = x_AD[_cut(tokens, row)] @ w["gate_up"][expert]
        result = hidden(new) @ w["down"][expert].T
        return _put(gate_up, new, row, is_own), _put(results, result, row, is_own)

    gate_up, results = _over_tiles(sizes, num_rows, compute, (gate_up, results))
    places = places.reshape(own_AK.shape)
    y_AD = jnp.einsum("akd,ak->ad", _read(results, places), weights_AK)
    saved = Saved(probabilities, ids_TK, x_AD, weights_AK, tokens, choices[:num_rows], places, sizes, gate_up)
    return axes.scatter_tokens(y_AD).reshape(x.shape), saved


def backward(axes: Axes, w: dict[str, jax.Array], saved: Saved, dy: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
    """The gradients of x [B, S, D] and of the weights; the router's is a sum over this device's tokens."""
    dy_AD = axes.gather_tokens(dy.reshape(-1, dy.shape[-1]))
    weights_N = saved.weights.reshape(-1)[saved.choices]
    num_rows = len(saved.tokens)
    dx_ND = jnp.zeros((num_rows, dy.shape[2]), dy.dtype)
    dweights_N = jnp.zeros(num_rows, dy.dtype)
    grads = {name: [jnp.zeros(one.shape, one.dtype) for one in w[name]] for name in ("gate_up", "down")}

    def compute(expert: int, row: jax.Array, is_own: jax.Array, carry: Any) -> Any:
        dx_ND, dweights_N, dgate_up_w, ddown_w = carry
        rows = _cut(saved.tokens, row)
        weight = jnp.where(is_own, _cut(weights_N, row)[:, None], 0.0)
        gate_up = _cut(saved.gate_up, row)
        activation = hidden(gate_up)
        dy = dy_AD[rows]
        dhidden = dy @ w["down"][expert]
        dweight = (dhidden * activation).sum(-1)
        dgate_up = hidden_backward(gate_up, dhidden * weight)
        dx = dgate_up @ w["gate_up"][expert].T
        dgate_up_w += saved.x[rows].T @ dgate_up
        ddown_w += (dy * weight).T @ activation
        return _put(dx_ND, dx, row, is_own), _put(dweights_N, dweight, row, is_own[:, 0]), dgate_up_w, ddown_w

    ends = jnp.cumsum(saved.sizes)
    for expert in range(len(ends)):
        carry = (dx_ND, dweights_N, grads["gate_up"][expert], grads["down"][expert])
        span = ends[expert] - saved.sizes[expert], saved.sizes[expert]
        carry = _over_tiles_of(expert, *span, num_rows, compute, carry)
        dx_ND, dweights_N, grads["gate_up"][expert], grads["down"][expert] = carry
    dx_TD = axes.scatter_tokens(_read(dx_ND, saved.places).sum(1))
    dweights_TK = axes.scatter_tokens(_read(dweights_N, saved.places))
    dlogits = _router_backward(saved, dweights_TK)
    x_TD = axes.own_tokens(saved.x)
    dx_TD += dlogits @ w["router"].T
    stacked = {name: jnp.stack(each) for name, each in grads.items()}
    return dx_TD.reshape(dy.shape), stacked | {"router": x_TD.T @ dlogits}


def _router_backward(saved: Saved, dweights_TK: jax.Array) -> jax.Array:
    best = jnp.take_along_axis(saved.probabilities, saved.ids, -1)
    total = best.sum(-1, keepdims=True)
    dbest = (dweights_TK - (dweights_TK * best).sum(-1, keepdims=True) / total) / total
    is_chosen = jax.nn.one_hot(saved.ids, saved.probabilities.shape[1])
    dprobabilities = jnp.einsum("tke,tk->te", is_chosen, dbest)
    p = saved.probabilities
    return p * (dprobabilities - (p * dprobabilities).sum(-1, keepdims=True))


def hidden(gate_up: jax.Array) -> jax.Array:
    """[R, 2 M] -> silu(gate) * up."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return gate * jax.nn.sigmoid(gate) * up


def hidden_backward(gate_up: jax.Array, dhidden: jax.Array) -> jax.Array:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    sigmoid = jax.nn.sigmoid(gate)
    dgate = dhidden * up * sigmoid * (1 + gate * (1 - sigmoid))
    return jnp.concatenate([dgate, dhidden * gate * sigmoid], axis=-1)


def _over_tiles(sizes: jax.Array, num_rows: int, compute: Callable, carry: Any) -> Any:
    ends = jnp.cumsum(sizes)
    for expert in range(len(sizes)):
        carry = _over_tiles_of(expert, ends[expert] - sizes[expert], sizes[expert], num_rows, compute, carry)
    return carry


def _over_tiles_of(expert: int, start: jax.Array, size: jax.Array, num_rows: int, compute: Callable, carry: Any) -> Any:
    """carry = compute(expert, row, is_own [R, 1], carry) for each tile of an expert."""

    def step(i: jax.Array, carry: Any) -> Any:
        own = start + i * TILE
        row = jnp.minimum(own, num_rows - TILE)
        rows = row + jnp.arange(TILE)
        return compute(expert, row, ((rows >= own) & (rows < start + size))[:, None], carry)

    return lax.fori_loop(0, (size + TILE - 1) // TILE, step, carry)


def _cut(x: jax.Array, row: jax.Array) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, row, TILE)


def _put(x: jax.Array, tile: jax.Array, row: jax.Array, is_own: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, jnp.where(is_own, tile, _cut(x, row)), row, 0)


def _read(rows: jax.Array, places_AK: jax.Array) -> jax.Array:
    """The rows of each choice; 0 for those of other devices' experts."""
    return rows.at[places_AK].get(mode="fill", fill_value=0)
