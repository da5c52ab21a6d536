"""The sum of the losses of all tokens, from the projection that computes their logits: one operation of a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshpar.mesh.varying import Axes, invariant, varying, varying_alike
from meshpar.parallel.context import current, manual, manual_axes, planned, tracing
from meshpar.partition.matmul import matmul
from meshpar.partition.op import apply
from meshpar.partition.signature import Call, Labels, Signature
from meshpar.sharding.rules import ACTIVATION_DIMS
from meshpar.train.chunks import Chunk, Cost, chunk_length, length_on_device, summed_in_chunks

VOCAB = "vocab"


def summed_over_logits(
    cost_over: Callable[[Axes], Cost], hidden: Float[Array, "*rows D"], head: Float[Array, "D V"], tokens: Any,
    shared: Any, chunk: Chunk,
) -> Float[Array, ""]:  # fmt: skip
    """The sum of the losses of all tokens. In chunks, neither forward nor backward holds all logits.

    Args:
      cost_over: the axes that shard the vocabulary -> the loss of a chunk, of whose arguments only the first one is
        differentiated.
      tokens: tree of [*rows, ...], of which `cost` gets a chunk [batch, chunk, ...].
      shared: tree of [..., vocab], which `cost` gets whole.

    Memory: the logits and their gradient, of one chunk; the gradient of the head, in float32 at least.
    Communication: that of `cost`, in each chunk; where the vocabulary is sharded the gradient of `hidden` is summed.
    """
    num_rows = hidden.ndim - 1
    leaves, tree = jax.tree.flatten((tokens, shared))
    num_of_tokens = len(jax.tree.leaves(tokens))
    of_shards = manual_axes(VOCAB)  # of a loss that is written for local shards

    def given(axes: Axes, leaves: Sequence[jax.Array]) -> Any:
        of_tokens = [invariant(x, axes) for x in leaves[:num_of_tokens]]  # the planner types all operands alike
        rows = leaves[0].shape[:1] if num_rows > 1 else (1,)
        of_tokens = [x.reshape(*rows, -1, *x.shape[num_rows:]) for x in of_tokens]
        return jax.tree.unflatten(tree, (*of_tokens, *leaves[num_of_tokens:]))

    def compute(call: Call, hidden: jax.Array, head: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
        axes = call.axes(VOCAB) or of_shards
        of_rows, of_all = given(axes, leaves)
        hidden = hidden.reshape(*jax.tree.leaves(of_rows)[0].shape[:2], -1)
        hidden, head = varying_alike(varying(hidden, axes), head)
        with tracing(current() if _has_rules(hidden, head) else None):
            return [_summed(cost_over(axes), hidden, head, of_rows, of_all, chunk)]

    def of_logits(call: Call, logits: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
        return [cost_over(call.axes(VOCAB))(logits, *given(call.axes(VOCAB), leaves))]

    rows = tuple(("rows", dim) for dim in range(num_rows))
    ins = ((*rows, None), (None, VOCAB), *(_labels(x, rows, i < num_of_tokens) for i, x in enumerate(leaves)))
    signature = Signature(ins, ((),), compute, summed=rows, closed=(VOCAB,))
    if num_rows == 2 and _is_one_chunk(chunk, hidden, head):
        signature = replace(signature, equation=("bsd", "dv", "bsv"), then=of_logits)
    return apply(signature, hidden, head, *leaves)[0]


def _is_one_chunk(chunk: Chunk, hidden: jax.Array, head: jax.Array) -> bool:
    """Whether a device of the planned program computes all of its logits at once."""
    ctx = planned()
    if ctx is None or not {"batch", "seq", VOCAB} <= {*ctx.rules.table, *ACTIVATION_DIMS}:
        return False
    rows, seq, width = hidden.shape
    sizes = rows // ctx.shards("batch"), seq // ctx.shards("seq"), width, head.shape[1] // ctx.shards(VOCAB)
    return chunk_length(chunk, *sizes) is None


def _labels(x: Any, rows: Labels, is_of_tokens: bool) -> Labels:
    return (*rows, *(None,) * (x.ndim - len(rows))) if is_of_tokens else (*(None,) * (x.ndim - 1), VOCAB)


def _summed(cost: Cost, hidden: jax.Array, head: jax.Array, tokens: Any, shared: Any, chunk: Chunk) -> jax.Array:
    length = length_on_device(chunk, hidden.shape[0], hidden.shape[1], head)
    if length is None:
        product = matmul(hidden, head) if manual() else jnp.einsum("bsd,dv->bsv", hidden, head)
        return cost(product, tokens, shared)
    return summed_in_chunks(cost, length, hidden, head, tokens, shared)


def _has_rules(hidden: jax.Array, head: jax.Array) -> bool:
    """Whether GSPMD is to shard these arrays by the rules of their dims; local shards need none."""
    ctx = current()
    if ctx is None or ctx.manual:
        return True
    sizes = zip(("batch", "seq", "embed", VOCAB), (*hidden.shape[:2], *head.shape), strict=True)
    return all((dim in ctx.rules.table or dim in ACTIVATION_DIMS) and n % ctx.shards(dim) == 0 for dim, n in sizes)
