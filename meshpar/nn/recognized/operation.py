"""Recognized attention as an operation that the partitioner knows by its signature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from meshpar.nn.attention.core import Documents, shares_rows
from meshpar.nn.attention.functional import hidden, local_attention
from meshpar.nn.recognized.band import Condition, Visible
from meshpar.nn.recognized.scores import Label
from meshpar.partition.signature import Call, Labels, Signature

TOKENS = "tokens"
KEYS = "keys"
SIZE = "head_dim"


@dataclass(frozen=True)
class Dims:
    """How the dims of attention correspond.

    Args:
      numbers: `dimension_numbers` of the product of queries and keys.
      keys: which operand of that product has the keys.
      tokens: the label of the tokens of the queries.
      value, out: the labels of the dims of the values and of the result.
      scale: of the scores.
      cap: of the scores: they are `cap * tanh(score / cap)`; None for as they are.
    """

    numbers: Any
    keys: Literal["left", "right"]
    tokens: Label
    value: tuple[Any, ...]
    out: tuple[Any, ...]
    scale: float = 1.0
    cap: float | None = None

    def operand(self, side: Literal["left", "right"], ndim: int) -> tuple[Any, ...]:
        """The labels of the dims of an operand of the product of queries and keys."""
        place = 0 if side == "left" else 1
        (contracted, batch) = self.numbers
        labels: list[Any] = [(side, i) for i in range(ndim)]
        for i in contracted[place]:
            labels[i] = SIZE
        for n, i in enumerate(batch[place]):
            labels[i] = ("batch", n)
        return tuple(labels)


def signature(dims: Dims, seen: Visible, dtype: Any, shapes: Sequence[tuple[int, ...]]) -> Signature:
    """The signature of attention on queries, keys, values of these shapes, and the arrays of its conditions.

    The tokens of queries, keys, values and result are one label, over whose axes attention communicates itself. Keys of
    another row that the devices of a row cannot share are whole on each.
    """
    of_q = "right" if dims.keys == "left" else "left"
    q = dims.operand(of_q, len(shapes[0]))
    k = dims.operand(dims.keys, len(shapes[1]))
    (key,) = [label for label in k if label != SIZE and label[0] != "batch"]
    rename = {dims.tokens: TOKENS, key: KEYS}
    is_shared = shares_rows(shapes[0][q.index(dims.tokens)], shapes[1][k.index(key)])
    conditions = [tuple(tuple(rename.get(x, x) for x in one) for one in c.labels) for c in seen.conditions]
    q, k, v, out = (tuple(rename.get(x, x) for x in one) for one in (q, k, dims.value, dims.out))
    shared = [x for x in q if isinstance(x, tuple) and x[0] == "batch"]
    groups = [x for x in q if isinstance(x, tuple) and x[0] != "batch"]
    own = {x for of in conditions for one in of for x in one}
    heads = [x for x in shared if x not in own][-1:] if len(shared) > 1 else []
    rows = [x for x in shared if x not in heads]

    def compute(call: Call, *shards: jax.Array) -> list[jax.Array]:
        sizes: dict[Any, int] = {}
        for one, x in zip((q, k, v), shards, strict=False):
            sizes |= dict(zip(one, x.shape, strict=True))
        of_q = _arranged(shards[0], q, [rows, [TOKENS], [*heads, *groups], [SIZE]], sizes)
        of_k = _arranged(shards[1], k, [rows, [KEYS], heads, [SIZE]], sizes)
        of_v = _arranged(shards[2], v, [rows, [KEYS], heads, ["features"]], sizes)
        given = iter(shards[3:])
        arrays = [
            [_of_rows(next(given), one, rows, (TOKENS, KEYS)[_is_of_keys(c, i)], sizes) for i, one in enumerate(of)]
            for c, of in zip(seen.conditions, conditions, strict=True)
        ]
        result = local_attention(
            of_q,
            of_k,
            of_v,
            causal=seen.band.is_causal,
            window=seen.band.window,
            segments=_documents(seen.conditions, arrays, of_q, of_k),
            scale=dims.scale,
            axes=call.axes(TOKENS) if is_shared else (),
            cap=dims.cap,
        )
        parts = [*rows, TOKENS, *heads, *groups, "features"]
        whole = result.reshape([sizes[x] for x in parts])
        return [whole.transpose([parts.index(x) for x in out]).astype(dtype)]

    def labels(one: tuple[Any, ...]) -> Labels:
        whole = {SIZE: None, "features": None, KEYS: TOKENS if is_shared else None}
        return tuple(whole.get(x, x) for x in one)

    ins = (q, k, v, *(one for of in conditions for one in of))
    return Signature(tuple(map(labels, ins)), (labels(out),), compute)


def _is_of_keys(condition: Condition, place: int) -> bool:
    return condition.kind == "keys" or (condition.kind == "documents" and place == 1)


def _documents(
    conditions: Sequence[Condition], arrays: Sequence[Sequence[jax.Array]], q: jax.Array, k: jax.Array
) -> jax.Array | Documents | None:
    """The documents in which all conditions hold: of tokens, which any core knows, or of queries and of keys."""
    if not conditions:
        return None
    if len(conditions) == 1 and conditions[0].is_of_tokens:
        return arrays[0][0].astype(jnp.int32)
    queries, keys = (jnp.zeros(x.shape[:2], jnp.int32) for x in (q, k))
    for condition, given in zip(conditions, arrays, strict=True):
        if condition.kind == "documents":
            queries, keys = (x.astype(jnp.int32) for x in given)
    for condition, (x, *_) in zip(conditions, arrays, strict=True):
        if condition.kind != "documents":
            valid = (x != 0) != condition.is_negated
            of_keys = condition.kind == "keys"
            queries, keys = hidden(queries, keys, None if of_keys else valid, valid if of_keys else None)
    return Documents(queries, keys)


def _of_rows(x: jax.Array, labels: Labels, rows: Sequence[Any], tokens: str, sizes: Any) -> jax.Array:
    """The array as [rows, tokens], with an element for each, also where it has one for all."""
    parts = [*rows, tokens]
    x = x.reshape([n for n, label in zip(x.shape, labels, strict=True) if label is not None])
    own = [label for label in labels if label is not None]
    x = x.transpose([own.index(label) for label in parts if label in own])
    x = x.reshape([sizes[label] if label in own else 1 for label in parts])
    return jnp.broadcast_to(x, [sizes[label] for label in parts]).reshape(-1, sizes[tokens])


def _arranged(x: jax.Array, labels: tuple[Any, ...], parts: Sequence[Sequence[Any]], sizes: Any) -> jax.Array:
    """The array with one dim for each part, in this order."""
    order = [labels.index(label) for part in parts for label in part]
    return x.transpose(order).reshape([math.prod(sizes[label] for label in part) for part in parts])
