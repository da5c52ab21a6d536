"""Attention as a function of arrays, for models of the user's own.

Shapes: B batch, S seq, T tokens of the keys' row, H heads, K kv_heads, h head_dim.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from meshpar.mesh.varying import Axes
from meshpar.nn.attention.auto import Auto, between
from meshpar.nn.attention.blocks import Blocks, block_size, in_blocks
from meshpar.nn.attention.context_parallel import over_consecutive
from meshpar.nn.attention.core import HIDDEN_KEY, HIDDEN_QUERY, Documents, documents, known_window, shares_rows
from meshpar.nn.attention.shards import Shards
from meshpar.nn.attention.tables import BlockGrid, ShardTables
from meshpar.parallel.context import platform
from meshpar.parallel.sequence import SEQ, SequenceLayout
from meshpar.partition.op import apply
from meshpar.partition.signature import Call, Signature


def attend(
    q: Float[Array, "B S H h"], k: Float[Array, "B T K h"], v: Float[Array, "B T K h"], *,
    causal: bool = True, window: int | None = None, segments: Int[Array, "B S"] | None = None,
    valid: Bool[Array, "B T"] | None = None, scale: float | None = None, cap: float | None = None,
) -> Float[Array, "B S H h"]:  # fmt: skip
    """Attention of the tokens of a row to each other, or to those of another row, by the fastest core of the platform.

    It never holds the scores of a whole row, and query heads may share key heads. Meshpar partitions it over batch and
    heads, and over tokens as `parallel.context` declares.

    Args:
      causal: whether a query attends only to tokens up to its own. False for keys of another row, of T tokens.
      window: how many tokens a query attends to, its own included; None for all up to its own.
      segments: the document of each token. A query attends to tokens of its own document.
      valid: which keys are tokens, not padding. A query that attends to no key gets the mean of all values.
      scale: of the scores. Default: `h ** -0.5`.
      cap: scores are `cap * tanh(score / cap)`, as in Gemma 2.

    Memory: see `Blocks`. Communication: see `Shards.visit_all`, if the tokens are sharded.

    Raises:
      ValueError: a window without `causal`; `causal` or `segments` with keys of another length; query heads that are no
        multiple of the key heads; a `cap` that is not positive.

    >>> x = jnp.ones((1, 4, 2, 8))
    >>> attend(x, x, x).shape
    (1, 4, 2, 8)
    >>> attend(x, x[:, :3], x[:, :3], causal=False, valid=jnp.array([[True, True, False]])).shape
    (1, 4, 2, 8)
    """
    _check(q, k, causal, window, segments, cap)
    is_shared = shares_rows(q.shape[SEQ], k.shape[SEQ])

    def compute(call: Call, q: Any, k: Any, v: Any, *more: Any) -> list[jax.Array]:
        of_q = q.reshape(*q.shape[:2], -1, q.shape[-1])
        left = iter(more)
        document = None if segments is None else next(left)
        if valid is not None:
            document = hidden(documents(document, of_q), documents(document, k), None, next(left))
        axes = call.axes("tokens") if is_shared else ()
        out = local_attention(
            of_q, k, v, causal=causal, window=window, segments=document, scale=scale, axes=axes, cap=cap
        )
        return [out.reshape(q.shape)]

    groups = q.shape[2] // k.shape[2]
    grouped = q.reshape(*q.shape[:2], k.shape[2], groups, q.shape[3])
    of_keys = ("rows", "tokens" if is_shared else None, "heads", None)
    of_queries = ("rows", "tokens", "heads", "group", None)
    given = [(x, of[:2]) for x, of in ((segments, of_queries), (valid, of_keys)) if x is not None]
    ins = (of_queries, of_keys, of_keys, *(labels for _, labels in given))
    signature = Signature(ins, (of_queries,), compute)
    return apply(signature, grouped, k, v, *(x for x, _ in given))[0].reshape(q.shape)


def _check(q: Any, k: Any, causal: bool, window: Any, segments: Any, cap: float | None) -> None:
    if window is not None and not causal:
        raise ValueError(f"window={window}: a window is of earlier tokens; leave causal=True")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads cannot share {k.shape[2]} key heads; give a multiple of them")
    if q.shape[1] != k.shape[1] and (causal or segments is not None):
        what = "segments are documents of one row" if not causal else "causal=True compares places in one row"
        raise ValueError(f"{q.shape[1]} queries and {k.shape[1]} keys: {what}; causal=False, and valid for padding")
    if cap is not None and not cap > 0:
        raise ValueError(f"cap={cap}: has to be positive; None for no cap")


def hidden(
    queries: Int[Array, "B S"], keys: Int[Array, "B T"], valid_queries: Bool[Array, "B S"] | None,
    valid_keys: Bool[Array, "B T"] | None,
) -> Documents:  # fmt: skip
    """Documents in which queries and keys that are not valid attend to nothing, and nothing attends to them."""
    if valid_queries is not None:
        queries = jnp.where(valid_queries, queries, HIDDEN_QUERY)
    if valid_keys is not None:
        keys = jnp.where(valid_keys, keys, HIDDEN_KEY)
    return Documents(queries, keys)


def local_attention(
    q: Float[Array, "B S H h"], k: Float[Array, "B T K h"], v: Float[Array, "B T K h"], *,
    causal: bool, window: int | None, segments: Any, scale: float | None, axes: Axes, cap: float | None = None,
) -> Float[Array, "B S H h"]:  # fmt: skip
    """Attention of local shards.

    Args:
      segments: the document of each token, or `Documents`; None if each row is one document.
      axes: those over which the rows are sharded, in order.
    """
    usual = q.shape[-1] ** -0.5
    if scale is not None and not math.isclose(scale, usual, rel_tol=1e-6):
        q = q * jnp.asarray(scale / usual, q.dtype)
    is_plain = causal and cap is None and not isinstance(segments, Documents)  # which every core computes
    if axes:
        return over_consecutive(Auto() if is_plain else Blocks(), q, k, v, segments, window, axes, causal, cap)
    if is_plain:
        return Auto()(q, k, v, segments, window)
    if not causal and cap is None and segments is None and (out := between(q, k, v)) is not None:
        return out
    queries, keys = (BlockGrid(x.shape[SEQ], block_size(platform())) for x in (q, k))
    tables = ShardTables(SequenceLayout(1), queries, known_window(window), causal, None if causal else keys)
    return in_blocks(Shards(tables, cap=cap), q, k, v, documents(segments, q, k), window)
