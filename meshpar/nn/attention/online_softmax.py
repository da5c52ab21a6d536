"""Attention over a table of block pairs, which never holds the scores of more than one pair.

The forward keeps a running maximum and sum of exponentials for each query, and rescales the result when the maximum
grows. The backward computes the scores of each pair again, from the log of the final sum. Both can process the keys in
several parts, each with its own table, see `shards`. Each is one loop over its table: with separate operations for each
of three pairs, XLA:CPU needed 1.3 times the time and memory.

Source: Dao 2023 (FlashAttention-2), arXiv:2307.08691; Milakov and Gimelshein 2018, arXiv:1805.02867.

Shapes: B batch, K kv_heads, G query heads for each of them, S queries, T keys, s and t of one block, h head_dim.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from meshpar.nn.attention.block_pairs import BlockGrid
from meshpar.nn.attention.core import causal_window
from meshpar.parallel.local import varying_like
from meshpar.parallel.precision import wide, wide_dtype


def by_key_head(q_BSHh: Float[Array, "B S H h"], num_key_heads: int) -> Float[Array, "B K G S h"]:
    """The queries of each key head."""
    batch, seq, _, size = q_BSHh.shape
    return q_BSHh.reshape(batch, seq, num_key_heads, -1, size).transpose(0, 2, 3, 1, 4)


def by_head(out_BKGSh: Float[Array, "B K G S h"]) -> Float[Array, "B S H h"]:
    """Undoes `by_key_head`."""
    batch, _, _, seq, size = out_BKGSh.shape
    return out_BKGSh.transpose(0, 3, 1, 2, 4).reshape(batch, seq, -1, size)


class Tokens(NamedTuple):
    """The places and documents of tokens, which decide whether a query attends to a key.

    Args:
      index: int32 [seq]. The place of each token in its row.
      segments: int32 [batch, seq]. The document of each token.
    """

    index: Int[Array, "S"]
    segments: Int[Array, "B S"]

    def block(self, start: jax.Array, size: int) -> Tokens:
        cut = partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
        return Tokens(cut(self.index, axis=0), cut(self.segments, axis=1))


class Meeting(NamedTuple):
    """Queries, and the keys and values that they attend to.

    Args:
      q: already divided by the square root of head_dim.
      window: how many tokens a query attends to, including its own; None for all up to its own.
    """

    q: Float[Array, "B K G S h"]
    k: Float[Array, "B K T h"]
    v: Float[Array, "B K T h"]
    queries: Tokens
    keys: Tokens
    window: Int[Array, ""] | None


class Softmax(NamedTuple):
    """The state of the online softmax, in float32 at least.

    Args:
      total: the exponentials times the values, relative to `highest`.
      highest: the largest score so far.
      mass: the sum of the exponentials, relative to `highest`.
    """

    total: Float[Array, "B K G S h"]
    highest: Float[Array, "B K G S"]
    mass: Float[Array, "B K G S"]

    def with_keys(self, scores: Float[Array, "B K G S t"], v: Float[Array, "B K t h"]) -> Softmax:
        """The state after further keys, see `masked_scores`."""
        highest = jnp.maximum(self.highest, scores.max(-1))
        shrunk = jnp.exp(self.highest - highest)
        weights = jnp.exp(scores - highest[..., None])
        values = _product("bkgst,bkth->bkgsh", weights.astype(v.dtype), v)
        return Softmax(self.total * shrunk[..., None] + values, highest, self.mass * shrunk + weights.sum(-1))

    def result(self) -> Float[Array, "B K G S h"]:
        return self.total / self.mass[..., None]

    def log_mass(self) -> Float[Array, "B K G S"]:
        """The log of the sum of the exponentials of all scores."""
        return self.highest + jnp.log(self.mass)


def empty(q: Float[Array, "B K G S h"]) -> Softmax:
    """The state of queries before the first key."""
    dtype = wide_dtype(q.dtype)
    rows = q.shape[:-1]
    state = Softmax(jnp.zeros(q.shape, dtype), jnp.full(rows, jnp.finfo(dtype).min, dtype), jnp.zeros(rows, dtype))
    return jax.tree.map(lambda x: varying_like(x, q), state)


def extend(grid: BlockGrid, state: Softmax, met: Meeting, pairs: Int[Array, "P 4"]) -> Softmax:
    """The state after the pairs of a table. Each query must attend to some key before its result is read.

    Args:
      pairs: rows of `BlockGrid.rows`.
    """
    q, k, v, *_ = met

    def step(state: Softmax, pair: jax.Array) -> tuple[Softmax, None]:
        visible = _visible(grid, pair, met)
        scores = masked_scores(_block(q, pair[0], grid), _block(k, pair[1], grid), visible)
        old = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, pair[0], grid.size, 3), state)
        new = old.with_keys(scores, _block(v, pair[1], grid))
        return jax.tree.map(lambda x, part: lax.dynamic_update_slice_in_dim(x, part, pair[0], 3), state, new), None

    return lax.scan(step, state, _after(q, pairs))[0]


class Backward(NamedTuple):
    """The values of each query that the backward needs.

    Args:
      grad: the gradient of the result.
      log_mass: see `Softmax.log_mass`.
      mean: the mean over keys of the gradients of a query's attention weights, weighted by these weights.
    """

    grad: Float[Array, "B K G S h"]
    log_mass: Float[Array, "B K G S"]
    mean: Float[Array, "B K G S"]


def backward_of(
    out_BSHh: Float[Array, "B S H h"], log_mass: Float[Array, "B K G S"], grad_BSHh: Float[Array, "B S H h"]
) -> Backward:
    """Computes the values of each query that the backward needs, from the result and its gradient."""
    mean_BSH = (wide(grad_BSHh) * wide(out_BSHh)).sum(-1)
    batch, kv_heads, groups, seq = log_mass.shape
    mean = mean_BSH.reshape(batch, seq, kv_heads, groups).transpose(0, 2, 3, 1)
    return Backward(by_key_head(grad_BSHh, kv_heads), log_mass, mean)


def add_gradients(
    grid: BlockGrid, grads: tuple[jax.Array, ...], known: Backward, met: Meeting, pairs: Int[Array, "P 4"]
) -> tuple[jax.Array, ...]:
    """Adds the gradients of q, k and v from the pairs of a table. It computes their scores again. See `extend`."""
    q, k, v, *_ = met
    # With keys before queries no product contracts the first dim of a score: XLA:CPU would copy the scores.
    k_BKhT = k.swapaxes(2, 3)

    def step(grads: tuple[jax.Array, ...], pair: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        def of_queries(x: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, pair[0], grid.size, 3)

        q_block = of_queries(q)
        grad_block = of_queries(known.grad)
        visible_Bts = _visible(grid, pair, met).swapaxes(1, 2)
        scores = _product("bkth,bkgsh->bktgs", _block(k, pair[1], grid), q_block)
        weights = jnp.exp(scores - of_queries(known.log_mass)[:, :, None])
        weights = jnp.where(visible_Bts[:, None, :, None], weights, jnp.zeros_like(weights))
        of_weights = _product("bkth,bkgsh->bktgs", _block(v, pair[1], grid), grad_block)
        # The gradient of a score is its weight times (the gradient of the weight - their mean over the keys).
        of_scores = (weights * (of_weights - of_queries(known.mean)[:, :, None])).astype(q.dtype)
        added = (
            _product("bkht,bktgs->bkhgs", lax.dynamic_slice_in_dim(k_BKhT, pair[1], grid.size, 3), of_scores),
            _product("bktgs,bkgsh->bkth", of_scores, q_block),
            _product("bktgs,bkgsh->bkth", weights.astype(v.dtype), grad_block),
        )
        starts = ((pair[0], 4), (pair[1], 2), (pair[1], 2))
        return tuple(_add(x, part, *start) for x, part, start in zip(grads, added, starts, strict=True)), None

    of_q, *of_keys = grads
    (of_q, *of_keys), _ = lax.scan(step, (jnp.moveaxis(of_q, -1, 2), *of_keys), _after(q, pairs))
    return jnp.moveaxis(of_q, 2, -1), *of_keys


def _after(q: jax.Array, pairs: Int[Array, "P 4"]) -> Int[Array, "P 4"]:
    """Makes the table depend on q.

    Otherwise JAX computes all masks before the loop over layers, because they depend on no layer, and stores one
    element for each score.
    """
    return lax.optimization_barrier((pairs, q.reshape(-1)[0]))[0]


def _visible(grid: BlockGrid, pair, met: Meeting) -> Bool[Array, "B s t"]:
    of_queries = met.queries.block(pair[0], grid.size)
    of_keys = met.keys.block(pair[1], grid.size)
    visible = causal_window(of_queries.index, of_keys.index, met.window)
    if grid.is_ragged:
        place = jnp.arange(grid.size, dtype=jnp.int32)
        visible &= (place >= pair[2] - pair[0])[:, None] & (place >= pair[3] - pair[1])
    return visible & (of_queries.segments[:, :, None] == of_keys.segments[:, None, :])


def masked_scores(
    q: Float[Array, "B K G S h"], k: Float[Array, "B K t h"], visible: Bool[Array, "B S t"]
) -> Float[Array, "B K G S t"]:
    """The scores of queries and keys; the lowest finite number where a query does not attend to a key."""
    scores = _product("bkgsh,bkth->bkgst", q, k)
    return jnp.where(visible[:, None, None], scores, jnp.finfo(scores.dtype).min)


def _product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(equation, left, right, preferred_element_type=wide_dtype(left.dtype))


def _block(x: jax.Array, start: jax.Array, grid: BlockGrid) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, start, grid.size, x.ndim - 2)


def _add(x: jax.Array, part: jax.Array, start: jax.Array, dim: int) -> jax.Array:
    old = lax.dynamic_slice_in_dim(x, start, part.shape[dim], dim)
    return lax.dynamic_update_slice_in_dim(x, old + part, start, dim)
