"""The attention core in blocks, which never holds the scores of a whole row.

Shapes: B batch, S seq, H heads, K kv_heads, h head_dim.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meshpar.config import Config, Positive
from meshpar.cost.flops import needed
from meshpar.mesh.varying import varying_alike
from meshpar.nn.attention.block_pairs import BlockGrid, causal_pairs, within_window
from meshpar.nn.attention.core import Window, needed_scores, whole_sequence
from meshpar.nn.attention.online_softmax import Tokens, attend
from meshpar.nn.attention.reference import Reference
from meshpar.nn.supported import Sharding
from meshpar.parallel.context import constrain

BLOCK_SIZE = 128


class Blocks(Config):
    """Computes scores block by block, and only those of blocks with a visible token; the backward computes them again.

    It computes the same as `reference`, on every backend and in every dtype. Blocks beyond a window are left out if
    all layers have the same window.

    Memory: the scores of one pair of blocks, B H block_size^2.
    Source: Dao 2023 (FlashAttention-2), arXiv:2307.08691.
    """

    shorthand: ClassVar = "kind"
    kind: Literal["blocks"] = "blocks"
    block_size: Positive = BLOCK_SIZE
    """The most tokens of a block. A row is divided into equal blocks, as few as possible."""
    has_cache: ClassVar[bool] = False
    sharding: ClassVar[Sharding] = Reference.sharding

    def __call__(
        self, q: Float[Array, "B S H h"], k: Float[Array, "B S K h"], v: Float[Array, "B S K h"],
        positions: Int[Array, "B S"], segments: Int[Array, "B S"], window: Window,
    ) -> tuple[Float[Array, "B S H h"], None]:  # fmt: skip
        whole_sequence()
        batch, seq, _, size = q.shape
        grid, pairs = self._table(seq, window)
        tokens = Tokens(jnp.arange(seq, dtype=jnp.int32), segments)
        # Under GSPMD a loop gets its shardings from its operands.
        k = constrain(k, "batch", "seq", "kv_heads", "head_dim")
        v = constrain(v, "batch", "seq", "kv_heads", "head_dim")
        q, k, v = varying_alike(q * jnp.asarray(size**-0.5, q.dtype), k, v)
        q_BKGSh = q.reshape(batch, seq, k.shape[2], -1, size).transpose(0, 2, 3, 1, 4)
        with needed(needed_scores(seq, window) / (len(pairs) * grid.size**2)):
            out_BKGSh: jax.Array = attend(
                grid, q_BKGSh, k.swapaxes(1, 2), v.swapaxes(1, 2), tokens, tokens,
                None if window is None else jnp.asarray(window, jnp.int32), jnp.asarray(grid.rows(pairs)),
            )  # fmt: skip
        return out_BKGSh.transpose(0, 3, 1, 2, 4).reshape(q.shape), None

    def describe(self, seq_len: int, window: int | None) -> str:
        """What it computes for a row of `seq_len` tokens."""
        grid, pairs = self._table(seq_len, window)
        return f"blocks: {len(pairs)} of {grid.num_blocks**2} pairs of blocks of {grid.size} tokens"

    def reference(self, seq_len: int, small_seq_len: int) -> Blocks:
        """The core of a small run with rows of `small_seq_len` tokens: with several blocks if the run's rows have."""
        return Blocks(block_size=small_seq_len if seq_len <= self.block_size else max(1, small_seq_len // 4))

    def _table(self, seq_len: int, window: Window) -> tuple[BlockGrid, np.ndarray]:
        grid = BlockGrid(seq_len, self.block_size)
        return grid, within_window(causal_pairs(grid.num_blocks), grid.size, window)
