"""The collectives of a layout. Every function is the identity where its axis is absent.

The backward is written by hand, so nothing here is differentiated: `enter` and `exit` are each other's transposes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

SEQ = 1
"""The position of the sequence dim in activations [batch, seq, embed]."""


@dataclass(frozen=True)
class Axes:
    """The mesh axes of a layout.

    Args:
      batch: shards the rows; gradients are summed over it.
      tensor: shards heads, MLP and vocabulary, as in Megatron-LM.
      sequence: whether `tensor` also shards the residual stream along the sequence.
      stored: whether `batch` also stores the parameters in shards: ZeRO-3.
      stage: shards the layers.
      expert: shards the experts, and rows beside `batch`.
      per_token: the experts of a token; 0 without experts.
    """

    batch: str | None = None
    tensor: str | None = None
    sequence: bool = False
    stored: bool = False
    stage: str | None = None
    expert: str | None = None
    per_token: int = 0

    def enter(self, x: jax.Array) -> jax.Array:
        """Residual stream [B, R, D] -> [B, S, D] on each device of `tensor`."""
        return lax.all_gather(x, self.tensor, axis=SEQ, tiled=True) if self.sequence else x

    def exit(self, y: jax.Array) -> jax.Array:
        """Partial sums [B, S, D] over `tensor` -> residual stream [B, R, D]."""
        if self.sequence:
            return lax.psum_scatter(y, self.tensor, scatter_dimension=SEQ, tiled=True)
        return lax.psum(y, self.tensor) if self.tensor else y

    def part(self, x: jax.Array) -> jax.Array:
        """This device's part [B, R, ...] of [B, S, ...]."""
        if not self.sequence:
            return x
        size = x.shape[SEQ] // lax.axis_size(self.tensor)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.tensor) * size, size, SEQ)

    def gather(self, weights: Any) -> Any:
        """Shards of a layer's weights -> the whole weights, where they are stored in shards."""
        if not self.stored:
            return weights
        return jax.tree.map(lambda w: lax.all_gather(w, self.batch, axis=0, tiled=True), weights)

    def gather_again(self, weights: Any, after: jax.Array) -> Any:
        """Gathers in the backward, as ZeRO-3 does. Without a barrier XLA would merge it with the forward's gather."""
        return self.gather(lax.optimization_barrier((weights, after))[0]) if self.stored else weights

    def reduce(self, grads: Any) -> Any:
        """Reduce-scatters the gradients of a layer over `batch`, if the weights are stored in shards."""
        if not self.stored:
            return grads
        return jax.tree.map(lambda g: lax.psum_scatter(g, self.batch, scatter_dimension=0, tiled=True), grads)

    def sum_vocab(self, x: jax.Array) -> jax.Array:
        return lax.psum(x, self.tensor) if self.tensor else x

    @property
    def rows(self) -> tuple[str, ...]:
        """The axes over which rows are sharded."""
        return tuple(axis for axis in (self.batch, self.expert) if axis)

    def sum_batch(self, x: Any) -> Any:
        return lax.psum(x, self.rows) if self.rows else x

    def gather_tokens(self, x: jax.Array) -> jax.Array:
        return lax.all_gather(x, self.expert, tiled=True) if self.expert else x

    def scatter_tokens(self, x: jax.Array) -> jax.Array:
        """The sums of [A, ...] over the devices of `expert`, this device's part."""
        return lax.psum_scatter(x, self.expert, tiled=True) if self.expert else x

    def own_tokens(self, x: jax.Array) -> jax.Array:
        """This device's part of the result of `gather_tokens`."""
        if not self.expert:
            return x
        size = len(x) // lax.axis_size(self.expert)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.expert) * size, size)

    def first_expert(self, num: int) -> jax.Array | int:
        """The number of the first of this device's experts."""
        return lax.axis_index(self.expert) * num if self.expert else 0

    def first_id(self, width: int) -> jax.Array | int:
        """The first token id of this device's shard of the vocabulary."""
        return lax.axis_index(self.tensor) * width if self.tensor else 0


def softmax_top(logits: jax.Array, axes: Axes) -> jax.Array:
    top = logits.max(-1)
    return lax.pmax(top, axes.tensor) if axes.tensor else jnp.asarray(top)
