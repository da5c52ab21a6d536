"""The attention core in blocks, which never holds the scores of a whole row.

Shapes: B batch, S seq, H heads, K kv_heads, h head_dim.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meshpar.config import Config, Positive
from meshpar.mesh.varying import varying_alike
from meshpar.nn.attention.core import Documents, Window, documents, known_window, shares_rows
from meshpar.nn.attention.setting import Setting
from meshpar.nn.attention.shards import Shards, attend
from meshpar.nn.attention.tables import BlockGrid, ShardTables, num_visible_pairs
from meshpar.parallel.context import constrain
from meshpar.parallel.precision import wide
from meshpar.parallel.sequence import SEQ, SequenceLayout

BLOCK_SIZE = 128
GPU_BLOCK_SIZE = 512
"""On GPUs a pair of blocks starts some 25 kernels, which take longer than 128 tokens compute."""


def block_size(platform: str | None) -> int:
    """The tokens of a block on this platform; None for no devices."""
    return GPU_BLOCK_SIZE if platform == "gpu" else BLOCK_SIZE


class Blocks(Config):
    """Computes scores in blocks, and skips blocks without a visible token; the backward computes the scores again.

    The result is that of `reference`, on every backend and in every dtype. Blocks beyond a window are skipped if all
    layers have the same window.

    Memory: the scores of one pair of blocks, B H block_size^2.
    Source: Dao 2023 (FlashAttention-2), arXiv:2307.08691.
    """

    shorthand: ClassVar = "kind"
    kind: Literal["blocks"] = "blocks"
    block_size: Positive = BLOCK_SIZE
    """The largest number of tokens in a block."""

    def __call__(
        self, q: Float[Array, "B S H h"], k: Float[Array, "B S K h"], v: Float[Array, "B S K h"],
        segments: Int[Array, "B S"] | None, window: Window,
    ) -> Float[Array, "B S H h"]:  # fmt: skip
        tables = ShardTables(SequenceLayout(1), BlockGrid(q.shape[1], self.block_size), known_window(window))
        return in_blocks(Shards(tables), q, k, v, documents(segments, q), window)

    def describe(self, setting: Setting) -> str:
        """Says which scores it computes for a row."""
        grid = BlockGrid(setting.seq_len, self.block_size)
        num_pairs = num_visible_pairs(grid, setting.window)
        return f"blocks: {num_pairs} of {grid.num_blocks**2} pairs of blocks of {grid.size} tokens"

    def reference(self, seq_len: int, small_seq_len: int) -> Blocks:
        """Returns the core for a small copy of a run. Its rows have several blocks if those of the run have."""
        return Blocks(block_size=small_seq_len if seq_len <= self.block_size else max(1, small_seq_len // 8))


def in_blocks(
    shards: Shards, q: Float[Array, "B S H h"], k: Float[Array, "B T K h"], v: Float[Array, "B T K h"],
    segments: Int[Array, "B S"] | Documents, window: Window,
) -> Float[Array, "B S H h"]:  # fmt: skip
    """Computes attention of a device's queries to the keys of all shards, in the layout of a `Core`.

    With `Documents`, a query that attends to no key gets the mean of all values: the softmax of equal scores.
    """
    # Under GSPMD a loop gets its shardings from its operands.
    if shares_rows(q.shape[SEQ], k.shape[SEQ]):
        k = constrain(k, "batch", "seq", "kv_heads", "head_dim")
        v = constrain(v, "batch", "seq", "kv_heads", "head_dim")
    q, k, v = varying_alike(q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype), k, v)
    width = None if window is None else jnp.asarray(window, jnp.int32)
    has_hidden = isinstance(segments, Documents)
    known = segments if has_hidden else Documents(segments, segments)
    found: Any = attend(shards, q, k, v, known, width)
    out_BSHh, sees_BHS = found
    if not has_hidden:
        return out_BSHh
    mean_B1Hh = jnp.repeat(_mean(shards, v), q.shape[2] // v.shape[2], axis=2)
    return jnp.where(sees_BHS.swapaxes(1, 2)[..., None], out_BSHh, mean_B1Hh)


def _mean(shards: Shards, v: Float[Array, "B T K h"]) -> Float[Array, "B 1 K h"]:
    """The mean of the values of all shards. Communication: an all-gather of one value for each row and head."""
    mean = wide(v).mean(1, keepdims=True)
    if shards.num_shards > 1:
        mean = lax.all_gather(mean, shards.axes, axis_index_groups=shards.groups).mean(0)
    return mean.astype(v.dtype)
