"""Recognized attention as an operation that the partitioner knows by its signature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax

from meshpar.nn.attention.functional import local_attention
from meshpar.nn.recognized.band import Band
from meshpar.nn.recognized.scores import Label
from meshpar.partition.signature import Call, Labels, Signature

TOKENS = "tokens"
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
    """

    numbers: Any
    keys: Literal["left", "right"]
    tokens: Label
    value: tuple[Any, ...]
    out: tuple[Any, ...]
    scale: float = 1.0

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


def signature(dims: Dims, band: Band, dtype: Any, shapes: Sequence[tuple[int, ...]]) -> Signature:
    """The signature of attention on queries, keys and values of these shapes.

    The tokens of queries, keys, values and result are one label, over whose axes attention communicates itself.
    """
    of_q = "right" if dims.keys == "left" else "left"
    q = dims.operand(of_q, len(shapes[0]))
    k = dims.operand(dims.keys, len(shapes[1]))
    (key,) = [label for label in k if label != SIZE and label[0] != "batch"]
    rename = {dims.tokens: TOKENS, key: TOKENS}
    q, k, v, out = (tuple(rename.get(x, x) for x in one) for one in (q, k, dims.value, dims.out))
    shared = [x for x in q if isinstance(x, tuple) and x[0] == "batch"]
    groups = [x for x in q if isinstance(x, tuple) and x[0] != "batch"]
    rows, heads = shared[:-1], shared[-1:] if len(shared) > 1 else []
    rows = rows if heads else shared

    def compute(call: Call, *shards: jax.Array) -> list[jax.Array]:
        sizes: dict[Any, int] = {}
        for one, x in zip((q, k, v), shards, strict=True):
            sizes |= dict(zip(one, x.shape, strict=True))
        of_q = _arranged(shards[0], q, [rows, [TOKENS], [*heads, *groups], [SIZE]], sizes)
        of_k = _arranged(shards[1], k, [rows, [TOKENS], heads, [SIZE]], sizes)
        of_v = _arranged(shards[2], v, [rows, [TOKENS], heads, ["features"]], sizes)
        result = local_attention(
            of_q,
            of_k,
            of_v,
            causal=band.is_causal,
            window=band.window,
            segments=None,
            scale=dims.scale,
            axes=call.axes(TOKENS),
        )
        parts = [*rows, TOKENS, *heads, *groups, "features"]
        whole = result.reshape([sizes[x] for x in parts])
        return [whole.transpose([parts.index(x) for x in out]).astype(dtype)]

    def labels(one: tuple[Any, ...]) -> Labels:
        return tuple(None if x in (SIZE, "features") else x for x in one)

    return Signature((labels(q), labels(k), labels(v)), (labels(out),), compute)


def _arranged(x: jax.Array, labels: tuple[Any, ...], parts: Sequence[Sequence[Any]], sizes: Any) -> jax.Array:
    """The array with one dim for each part, in this order."""
    order = [labels.index(label) for part in parts for label in part]
    return x.transpose(order).reshape([math.prod(sizes[label] for label in part) for part in parts])
