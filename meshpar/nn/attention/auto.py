"""Selects an attention core by the length of the rows."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import jax

from meshpar.config import Config
from meshpar.nn.attention.blocks import BLOCK_SIZE, Blocks
from meshpar.nn.attention.core import Window
from meshpar.nn.attention.reference import Reference
from meshpar.nn.supported import Sharding


class Auto(Config):
    """`reference` for rows of one block, else `blocks`."""

    shorthand: ClassVar = "kind"
    kind: Literal["auto"] = "auto"
    has_cache: ClassVar[bool] = False
    sharding: ClassVar[Sharding] = {}
    block_size: ClassVar[int] = BLOCK_SIZE

    def select(self, seq_len: int) -> tuple[Reference | Blocks, str]:
        """The core for rows of `seq_len` tokens, and the reason."""
        if seq_len <= BLOCK_SIZE:
            return (
                Reference(),
                f"rows are one block of at most {BLOCK_SIZE} tokens, which blocks would compute twice",
            )
        return Blocks(), f"rows have more than {BLOCK_SIZE} tokens"

    def describe(self, seq_len: int, window: int | None) -> str:
        """Which core it selects for rows of `seq_len` tokens, and why."""
        core, why = self.select(seq_len)
        return f"{core.describe(seq_len, window)}; {why}"

    def reference(self, seq_len: int, small_seq_len: int) -> Reference | Blocks:
        """The core of a small run: that which rows of `seq_len` tokens have, although small rows would get another."""
        core, _ = self.select(seq_len)
        return core.reference(seq_len, small_seq_len)

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, segments: Any, window: Window
    ) -> tuple[jax.Array, Any]:
        core, _ = self.select(q.shape[1])
        return core(q, k, v, positions, segments, window)
