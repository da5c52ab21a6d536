"""Attention over a table of block pairs, which never holds the scores of more than one pair.

The forward keeps a running maximum and sum of exponentials for each query, and rescales the result when the maximum
grows. The backward computes the scores of each pair again, from the log of the final sum. Both can process the keys in
several parts, each with its own table, see `shards`.

Source: Dao 2023 (FlashAttention-2), arXiv:2307.08691; Milakov and Gimelshein 2018, arXiv:1805.02867.

Blocks are transposed when they are cut out, so that heads are in front of tokens: XLA:CPU would transpose whole arrays
in one pass, and copy them for the loop in another. The query heads of a key head are rows of one matrix: a dim of
their own, of size 1 without grouped queries, would be copied too.

Shapes: B batch, H heads, K kv_heads, G query heads for each of them, S queries, T keys, s and t of one block, r = G s
rows, h head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from meshpar.mesh.varying import varying_like
from meshpar.nn.attention.core import causal_window
from meshpar.nn.attention.tables import BlockGrid, Grids
from meshpar.parallel.precision import wide, wide_dtype
from meshpar.parallel.xla import not_before

UNROLLED_PAIRS = 3
"""A table of at most so many pairs, as that of two blocks, is no loop. A loop fills its carry with zeros, and cuts
blocks out at places that XLA does not know. Longer tables without a loop take more memory, and no less time."""


class Tokens(NamedTuple):
    """The places and documents of tokens, which decide whether a query attends to a key.

    Args:
      index: int32 [seq]. The place of each token in its row.
      segments: int32 [batch, seq]. The document of each token.
    """

    index: Int[Array, "S"]
    segments: Int[Array, "B S"]

    def block(self, start: jax.Array, grid: BlockGrid) -> Tokens:
        return Tokens(_block(self.index, start, grid, 0), _block(self.segments, start, grid))


class Inputs(NamedTuple):
    """Queries, and the keys and values that they attend to.

    Args:
      q: already divided by the square root of head_dim.
      window: how many tokens a query attends to, including its own; None for all up to its own.
      is_causal: whether a query attends only to tokens up to its own; else to all.
      cap: scores are `cap * tanh(score / cap)`; None for as they are.
    """

    q: Float[Array, "B S H h"]
    k: Float[Array, "B T K h"]
    v: Float[Array, "B T K h"]
    queries: Tokens
    keys: Tokens
    window: Int[Array, ""] | None
    is_causal: bool = True
    cap: float | None = None


class Softmax(NamedTuple):
    """The state of the online softmax, in float32 at least.

    Args:
      total: the exponentials times the values, relative to `highest`.
      highest: the largest score so far.
      mass: the sum of the exponentials, relative to `highest`.
    """

    total: Float[Array, "B H S h"]
    highest: Float[Array, "B H S"]
    mass: Float[Array, "B H S"]

    def with_keys(self, scores: Float[Array, "B H S t"], v: Float[Array, "B t K h"]) -> Softmax:
        """The state after further keys, see `masked_scores`."""
        highest = jnp.maximum(self.highest, scores.max(-1))
        shrunk = jnp.exp(self.highest - highest)
        weights = jnp.exp(scores - highest[..., None])
        v_BKth = v.swapaxes(1, 2)
        values = _product("bkrt,bkth->bkrh", _rows(weights.astype(v.dtype), v_BKth), v_BKth)
        total = self.total * shrunk[..., None] + values.reshape(self.total.shape)
        return Softmax(total, highest, self.mass * shrunk + weights.sum(-1))

    def result(self) -> Float[Array, "B S H h"]:
        return (self.total / self.mass[..., None]).swapaxes(1, 2)

    def sees(self) -> Bool[Array, "B H S"]:
        """Whether a query attends to any key."""
        return self.highest > jnp.finfo(self.highest.dtype).min

    def log_mass(self) -> Float[Array, "B H S"]:
        """The log of the sum of the exponentials of all scores."""
        return self.highest + jnp.log(self.mass)


def empty(q: Float[Array, "B S H h"]) -> Softmax:
    """The state of queries before the first key."""
    dtype = wide_dtype(q.dtype)
    batch, seq, heads, size = q.shape
    rows = (batch, heads, seq)
    state = Softmax(
        jnp.zeros((*rows, size), dtype), jnp.full(rows, jnp.finfo(dtype).min, dtype), jnp.zeros(rows, dtype)
    )
    return jax.tree.map(lambda x: varying_like(x, q), state)


def extend(grids: Grids, state: Softmax, inputs: Inputs, pairs: Int[Array, "P 4"]) -> Softmax:
    """The state after the pairs of a table. The result of a query that attends to no key has no meaning, see `sees`.

    Args:
      pairs: rows of `Grids.rows`.
    """
    q, k, v, *_ = inputs

    def step(state: Softmax, pair: jax.Array) -> tuple[Softmax, None]:
        visible = _visible(grids, pair, inputs)
        scores = masked_scores(_block(q, pair[0], grids.queries), _block(k, pair[1], grids.keys), visible, inputs.cap)
        old = jax.tree.map(lambda x: _block(x, pair[0], grids.queries, 2), state)
        new = old.with_keys(scores, _block(v, pair[1], grids.keys))
        return jax.tree.map(lambda x, part: _with_block(x, part, pair[0], 2), state, new), None

    return _for_each(step, state, q, pairs)


class Backward(NamedTuple):
    """The values of each query that the backward needs.

    Args:
      grad: the gradient of the result.
      log_mass: see `Softmax.log_mass`.
      mean: the mean over keys of the gradients of a query's attention weights, weighted by these weights.
    """

    grad: Float[Array, "B S H h"]
    log_mass: Float[Array, "B H S"]
    mean: Float[Array, "B H S"]


def backward_of(
    out: Float[Array, "B S H h"], log_mass: Float[Array, "B H S"], grad: Float[Array, "B S H h"]
) -> Backward:
    """Computes the values of each query that the backward needs, from the result and its gradient."""
    return Backward(grad, log_mass, (wide(grad) * wide(out)).sum(-1).swapaxes(1, 2))


def add_gradients(
    grids: Grids, grads: tuple[jax.Array, ...], known: Backward, inputs: Inputs, pairs: Int[Array, "P 4"]
) -> tuple[jax.Array, ...]:
    """Adds the gradients of q, k and v from the pairs of a table. It computes their scores again. See `extend`."""
    q, k, v, *_ = inputs
    num_groups = q.shape[2] // k.shape[2]

    def step(grads: tuple[jax.Array, ...], pair: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        k_BKth = _block(k, pair[1], grids.keys).swapaxes(1, 2)
        v_BKth = _block(v, pair[1], grids.keys).swapaxes(1, 2)

        q_BKrh = _rows(_block(q, pair[0], grids.queries).swapaxes(1, 2), k_BKth)
        grad_BKrh = _rows(_block(known.grad, pair[0], grids.queries).swapaxes(1, 2), k_BKth)
        log_mass_BKr = _rows(_block(known.log_mass, pair[0], grids.queries, 2), k_BKth)
        mean_BKr = _rows(_block(known.mean, pair[0], grids.queries, 2), k_BKth)
        visible_Btr = jnp.tile(_visible(grids, pair, inputs).swapaxes(1, 2), num_groups)
        # With keys before queries no product contracts the first dim of a score: XLA:CPU would copy the scores.
        scores, slope = _capped(_product("bkth,bkrh->bktr", k_BKth, q_BKrh), inputs.cap)
        logs = scores - log_mass_BKr[:, :, None]
        weights = jnp.exp(jnp.where(visible_Btr[:, None], logs, jnp.finfo(logs.dtype).min))  # 0 where it is not visible
        of_weights = _product("bkth,bkrh->bktr", v_BKth, grad_BKrh)
        # The gradient of a score is its weight times (the gradient of the weight - their mean over the keys).
        of_scores = weights * (of_weights - mean_BKr[:, :, None])
        of_scores = (of_scores if slope is None else of_scores * slope).astype(q.dtype)
        of_q_BKhr = _product("bkht,bktr->bkhr", k_BKth.swapaxes(2, 3), of_scores)
        of_q_BKhGs = of_q_BKhr.reshape(*of_q_BKhr.shape[:3], num_groups, grids.queries.size)
        of_k_BKth = _product("bktr,bkrh->bkth", of_scores, q_BKrh)
        of_v_BKth = _product("bktr,bkrh->bkth", weights.astype(v.dtype), grad_BKrh)
        of_q_BsHh = of_q_BKhGs.transpose(0, 4, 1, 3, 2).reshape(*q.shape[:1], grids.queries.size, *q.shape[2:])
        added = (of_q_BsHh, of_k_BKth.swapaxes(1, 2), of_v_BKth.swapaxes(1, 2))
        starts = (pair[0], pair[1], pair[1])
        blocks = (grids.queries, grids.keys, grids.keys)
        old = [_block(x, start, grid) for x, start, grid in zip(grads, starts, blocks, strict=True)]
        new = [x + part for x, part in zip(old, added, strict=True)]
        return tuple(_with_block(x, part, start) for x, part, start in zip(grads, new, starts, strict=True)), None

    return _for_each(step, grads, q, pairs)


def _for_each(step: Callable[[Any, jax.Array], tuple[Any, None]], carry: Any, q: jax.Array, pairs: Int[Array, "P 4"]):
    """The carry after the pairs of a table, which needs no loop if it is short."""
    if len(pairs) <= UNROLLED_PAIRS:
        return lax.scan(step, carry, pairs, unroll=True)[0]
    # Else JAX computes all masks before the loop over layers, and stores one element for each score.
    return lax.scan(step, carry, not_before(pairs, q.reshape(-1)[0]))[0]


def _visible(grids: Grids, pair, inputs: Inputs) -> Bool[Array, "B s t"]:
    of_queries = inputs.queries.block(pair[0], grids.queries)
    of_keys = inputs.keys.block(pair[1], grids.keys)
    visible = of_queries.segments[:, :, None] == of_keys.segments[:, None, :]
    if inputs.is_causal:
        visible &= causal_window(of_queries.index, of_keys.index, inputs.window)
    if grids.is_ragged:
        queries, keys = (jnp.arange(grid.size, dtype=jnp.int32) for grid in grids)
        visible &= (queries >= pair[2] - pair[0])[:, None] & (keys >= pair[3] - pair[1])
    return visible


def masked_scores(
    q: Float[Array, "B S H h"], k: Float[Array, "B t K h"], visible: Bool[Array, "B S t"], cap: float | None = None
) -> Float[Array, "B H S t"]:
    """The scores of queries and keys; the lowest finite number where a query does not attend to a key."""
    q_BHSh = q.swapaxes(1, 2)
    k_BKth = k.swapaxes(1, 2)
    scores = _product("bkrh,bkth->bkrt", _rows(q_BHSh, k_BKth), k_BKth).reshape(*q_BHSh.shape[:3], -1)
    return jnp.where(visible[:, None], _capped(scores, cap)[0], jnp.finfo(scores.dtype).min)


def _capped(scores: jax.Array, cap: float | None) -> tuple[jax.Array, jax.Array | None]:
    """`cap * tanh(scores / cap)` and its derivative; without a cap the scores, and None."""
    if cap is None:
        return scores, None
    bounded = jnp.tanh(scores / cap)
    return cap * bounded, 1 - jnp.square(bounded)


def _rows(x_BHs: Float[Array, "B H s *rest"], like: Float[Array, "B K t h"]) -> Float[Array, "B K r *rest"]:
    """The rows of all query heads of each key head."""
    return x_BHs.reshape(*like.shape[:2], -1, *x_BHs.shape[3:])


def _product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(equation, left, right, preferred_element_type=wide_dtype(left.dtype))


def _block(x: jax.Array, start: jax.Array, grid: BlockGrid, dim: int = 1) -> jax.Array:
    """The tokens of one block. A row that is a single block is not cut."""
    if x.shape[dim] == grid.size:
        return x
    return lax.dynamic_slice_in_dim(x, start, grid.size, dim, allow_negative_indices=False)


def _with_block(x: jax.Array, part: jax.Array, start: jax.Array, dim: int = 1) -> jax.Array:
    """The row with other tokens in one block."""
    if x.shape == part.shape:
        return part
    return lax.dynamic_update_slice_in_dim(x, part, start, dim, allow_negative_indices=False)
