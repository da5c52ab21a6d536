"""Attention as its definition has it: `softmax(q k^T) v`, with all scores of a row at once.

Shapes: B batch, S query positions, T key positions, H heads, K kv_heads, G = H / K, h head_dim.
"""

from __future__ import annotations

from fractions import Fraction
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from meshpar.config import Config
from meshpar.nn.attention.core import Window, causal_window, documents, needed_scores
from meshpar.nn.attention.setting import Setting
from meshpar.nn.remat import named
from meshpar.parallel.precision import wide
from meshpar.parallel.scopes import needed


def dot_product_attention(
    q_BSHh: Float[Array, "B S H h"],
    k_BTKh: Float[Array, "B T K h"],
    v_BTKh: Float[Array, "B T K h"],
    visible_BST: Bool[Array, "B S T"],
) -> Float[Array, "B S H h"]:
    """Computes `softmax(q k^T / sqrt(h)) v` over the visible keys of each query. Returns [B, S, H, h].

    Numerics: softmax in float32 at least. Memory: the scores, B H S T.
    """
    batch, seq, _, size = q_BSHh.shape
    q_BSKGh = q_BSHh.reshape(batch, seq, k_BTKh.shape[2], -1, size) * jnp.asarray(size**-0.5, q_BSHh.dtype)
    scores = wide(jnp.einsum("bskgh,btkh->bkgst", q_BSKGh, k_BTKh))
    scores = jnp.where(visible_BST[:, None, None], scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BTKh.dtype)
    return jnp.einsum("bkgst,btkh->bskgh", weights, v_BTKh).reshape(q_BSHh.shape)


def causal(segments_BS: Int[Array, "B S"], window: Window = None) -> Bool[Array, "B S S"]:
    """Which tokens each token attends to: itself, and earlier tokens of its document."""
    index = jnp.arange(segments_BS.shape[1], dtype=jnp.int32)
    return causal_window(index, index, window) & (segments_BS[:, :, None] == segments_BS[:, None, :])


class Reference(Config):
    """Computes all scores, and masks those that a query does not attend to. Memory: the scores, B H S S."""

    shorthand: ClassVar = "kind"
    kind: Literal["reference"] = "reference"

    def __call__(
        self, q: Float[Array, "B S H h"], k: Float[Array, "B S K h"], v: Float[Array, "B S K h"],
        segments: Int[Array, "B S"] | None, window: Window,
    ) -> Float[Array, "B S H h"]:  # fmt: skip
        length = q.shape[1]  # a symbol in an export
        share = needed_scores(length, window) / length**2 if isinstance(length, int) else Fraction(1)
        with needed(share):
            return named(dot_product_attention(q, k, v, causal(documents(segments, q), window)), "attn")

    def describe(self, setting: Setting) -> str:
        """Says which scores it computes for a row."""
        return f"reference: all {setting.seq_len} x {setting.seq_len} scores of a row and head, which it holds"

    def reference(self, seq_len: int, small_seq_len: int) -> Reference:
        """Returns the core for a small copy of a run."""
        return self
