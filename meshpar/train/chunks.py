"""The output projection and a loss of its logits, computed together in chunks of the sequence.

    logits[B, S, V_t] = hidden[B, S, D] @ head[D, V_t],   loss = sum of the losses of all tokens

The logits are by far the largest activation of a model with a large vocabulary. In chunks of C positions a device holds
[B, C, V_t] of them. A loss that is differentiated computes the gradients of a chunk right after its loss, while its
logits exist. The loss is a sum, so its cotangent is one number, and the backward multiplies the gradients by it. Each
logit is computed once, as without chunks, and the program has the same FLOPs.

Source: Hsu et al. 2024, arXiv:2410.10989 (Liger Kernel).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from meshpar.mesh.varying import varying_like
from meshpar.parallel.context import constrain, current
from meshpar.parallel.precision import wide
from meshpar.parallel.sequence import SEQ
from meshpar.tree import human_bytes

Chunk = Literal["auto", "none"] | int
"""The tokens of a chunk on a device; `auto` selects by `chunk_length`, `none` computes all logits at once."""
Cost = Callable[[jax.Array, Any, Any], jax.Array]
"""(logits [batch, chunk, vocab], tree of [batch, chunk, ...], tree of arrays that all chunks share) -> float[], the sum
of the losses of these tokens."""

MIN_TOKENS = 1024
"""`auto` never makes smaller chunks: each reads and writes the gradient of the whole head."""
MIN_BYTES = 2**25
"""`auto` never makes chunks whose logits are smaller, in float32."""
_WIDTH = 4
"""Bytes of a logit in float32, in which the loss is computed."""


def chunk_length(chunk: Chunk, rows: int, seq: int, hidden_size: int, vocab: int) -> int | None:
    """The positions of a chunk; None for all at once.

    `auto` makes chunks only if they need less memory: the logits of a chunk and the sum of the head's gradients,
    [hidden_size, vocab], instead of the logits of all tokens. So a device must have more tokens than a chunk and
    `hidden_size` together.

    Args:
      rows, seq, vocab: the sizes of the logits on one device.

    >>> chunk_length("auto", rows=8, seq=8192, hidden_size=4096, vocab=32064)
    128
    >>> chunk_length("auto", rows=8, seq=256, hidden_size=4096, vocab=32064) is None
    True
    """
    if chunk == "none":
        return None
    tokens = max(MIN_TOKENS, MIN_BYTES // (vocab * _WIDTH)) if chunk == "auto" else chunk
    length = max(1, tokens // rows)
    if chunk == "auto" and rows * seq <= rows * length + hidden_size:
        return None
    return length if length < seq else None


def describe_chunk(chunk: Chunk, rows: int, seq: int, hidden_size: int, vocab: int) -> str:
    """The choice of `chunk_length` as text, with the bytes of the logits in float32.

    >>> describe_chunk("auto", rows=8, seq=8192, hidden_size=4096, vocab=32064)
    '64 chunks of 128 positions: 125.25 MiB of logits at a time, not 7.83 GiB'
    """
    length = chunk_length(chunk, rows, seq, hidden_size, vocab)
    position_bytes = rows * vocab * _WIDTH
    if length is None:
        return f"one chunk: {human_bytes(seq * position_bytes)} of logits"
    chunks = f"{-(-seq // length)} chunks of {length} position{'s' if length > 1 else ''}"
    held = human_bytes(length * position_bytes)
    return f"{chunks}: {held} of logits at a time, not {human_bytes(seq * position_bytes)}"


def length_on_device(chunk: Chunk, rows: int, seq: int, head: jax.Array) -> int | None:
    """`chunk_length` for these rows and this head: global arrays under GSPMD, else local shards."""
    if _global("seq") > 1:  # GSPMD would gather a sharded sequence to cut it in chunks
        return None
    width, vocab = head.shape
    return chunk_length(chunk, rows // _global("batch"), seq, width, vocab // _global("vocab"))


def summed_in_chunks(
    cost: Cost, length: int, hidden: Float[Array, "B S D"], head: Float[Array, "D V"], tokens: Any, shared: Any
) -> Float[Array, ""]:
    """See `train.projected`. The hidden states are those of whole rows, typed as varying like the head."""
    hidden = constrain(hidden, "batch", "seq", "embed")
    return _summed(cost, length, hidden, _for_each_group(head), tokens, shared)


def _for_each_group(head: Float[Array, "D V"]) -> Float[Array, "G D V"]:
    """The head for each group of rows that is on one device. In the manual lowering a device has one group.

    Under GSPMD a gradient that is summed in a loop would be reduced over devices in every chunk. Each group has a
    gradient of its own, sharded like the rows; the sum over groups, after the loop, is the only reduction.
    """
    return constrain(jnp.broadcast_to(head, (_global("batch"), *head.shape)), "batch", "embed", "vocab")


def _global(dim: str) -> int:
    """The number of shards of a dim whose array is global, under GSPMD; 1 for local shards."""
    ctx = current()
    return 1 if ctx is None or ctx.manual else ctx.shards(dim)


def _of_chunk(
    cost: Cost, hidden_BCD: Float[Array, "B C D"], head_GDV: Float[Array, "G D V"], tokens: Any, shared: Any
) -> Float[Array, ""]:
    groups = hidden_BCD.reshape(head_GDV.shape[0], -1, *hidden_BCD.shape[1:])
    logits = jnp.einsum("gbsd,gdv->gbsv", groups, head_GDV).reshape(*hidden_BCD.shape[:2], -1)
    return cost(constrain(logits, "batch", "seq", "vocab"), tokens, shared)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed(cost: Cost, length: int, hidden: jax.Array, head: jax.Array, tokens: Any, shared: Any) -> jax.Array:
    def visit(_: None, chunk: Any) -> tuple[None, Any]:
        hidden, tokens = chunk
        return None, (_of_chunk(cost, hidden, head, tokens, shared), None)

    return _in_chunks(visit, None, (hidden, tokens), length)[1]


def _with_gradients(cost: Cost, length: int, hidden: jax.Array, head: jax.Array, tokens: Any, shared: Any) -> Any:
    def visit(d_head: jax.Array, chunk: Any) -> tuple[jax.Array, Any]:
        hidden, tokens = chunk
        total, (d_hidden, more) = jax.value_and_grad(partial(_of_chunk, cost), (0, 1))(hidden, head, tokens, shared)
        return d_head + more.astype(d_head.dtype), (total, d_hidden)

    zeros = constrain(varying_like(jnp.zeros_like(wide(head)), head), "batch", "embed", "vocab")
    d_head, total, d_hidden = _in_chunks(visit, zeros, (hidden, tokens), length)
    return total, (d_hidden, d_head.astype(head.dtype))


def _scaled(cost: Cost, length: int, gradients: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, None, None]:
    d_hidden, d_head = gradients
    return d_hidden * cotangent.astype(d_hidden.dtype), d_head * cotangent.astype(d_head.dtype), None, None


_summed.defvjp(_with_gradients, _scaled)


def _in_chunks(
    visit: Callable[[Any, Any], tuple[Any, tuple[jax.Array, Any]]], carry: Any, arrays: Any, length: int
) -> tuple[Any, jax.Array, Any]:
    """Visits the arrays [batch, seq, ...] in chunks of the sequence, the last of which may be shorter.

    Args:
      visit: (carry, arrays of a chunk) -> (carry, (float[], tree of [batch, chunk, ...])).

    Returns:
      The last carry, the sum of the numbers, and the trees joined to [batch, seq, ...].
    """
    seq = jax.tree.leaves(arrays)[0].shape[SEQ]
    rest = seq % length

    def visit_from(carry: Any, start: jax.Array | int, size: int = length) -> Any:
        # Slices of whole arrays: as inputs of the scan, the arrays would be copied in chunks.
        return visit(carry, jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, SEQ), arrays))

    def join(x: jax.Array) -> jax.Array:
        return x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:])

    starts = jnp.arange(0, seq - rest, length, dtype=jnp.int32)
    carry, (totals, found) = lax.scan(visit_from, carry, starts)
    total = totals.sum()
    found = jax.tree.map(join, found)
    if rest:
        carry, (last, more) = visit_from(carry, seq - rest, rest)
        total += last
        found = jax.tree.map(lambda *both: jnp.concatenate(both, SEQ), found, more)
    return carry, total, found
