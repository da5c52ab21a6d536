"""Which tokens of a row each shard of a sequence holds.

Causal attention gives late tokens more work than early ones. With contiguous shards the last of n devices computes
2 - 1/n times the mean. In the zigzag layout each shard holds a chunk from the front and one from the back of the row,
so that all have the same work.

Source: Zhu 2024 (zigzag ring attention), github.com/zhuzilin/ring-flash-attention; Grattafiori et al. 2024,
arXiv:2407.21783, section 3.3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

SEQ = 1
"""The position of the sequence dim in activations [batch, seq, ...]."""


@dataclass(frozen=True)
class SequenceLayout:
    """A row is cut into chunks of equal length, and each shard holds one chunk, or two with `is_zigzag`.

    >>> SequenceLayout(2, is_zigzag=True).chunks.tolist()
    [[0, 3], [1, 2]]
    >>> SequenceLayout(2, is_zigzag=True).order(8).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """

    num_shards: int
    is_zigzag: bool = False

    @cached_property
    def chunks(self) -> np.ndarray:
        """int[shard, chunk of the shard]: which chunks of a row each shard holds, in its order."""
        shard = np.arange(self.num_shards)
        return np.stack([shard, 2 * self.num_shards - 1 - shard], 1) if self.is_zigzag else shard[:, None]

    def order(self, seq_len: int) -> np.ndarray:
        """int[seq_len]: the token of a row at each place of the shards, joined in their order."""
        return np.arange(seq_len).reshape(self.chunks.size, -1)[self.chunks.reshape(-1)].reshape(-1)

    def tokens(self, places: Int[Array, "S"], seq_len: int) -> Int[Array, "S"]:
        """The tokens of a row at these places, in a traced program."""
        if self.num_shards == 1:
            return places
        length = jnp.asarray(seq_len // self.chunks.size, places.dtype)
        chunk, inside = jax.lax.div(places, length), jax.lax.rem(places, length)  # places are not negative
        return jnp.asarray(self.chunks.reshape(-1), jnp.int32)[chunk] * length + inside

    def tokens_of(self, shard: jax.Array | int, length: int) -> Int[Array, "S"]:
        """The tokens of a row that a shard of `length` tokens holds, in a traced program."""
        return self.tokens(shard * length + jnp.arange(length, dtype=jnp.int32), length * self.num_shards)
