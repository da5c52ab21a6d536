"""The loops over a decoder's layers, which are rows of one stack, or of two if only some layers have experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax

from meshpar.nn.experts import Experts
from meshpar.parallel.outputs import Auxiliary

BLOCKS = "blocks"
DENSE_BLOCKS = "dense_blocks"
"""The keys of the stacks of layers in the tree of parameters. If only some layers have experts, `blocks` contains those
with experts, and `dense_blocks` the others."""

Layer = Callable[[Any, Any], tuple[Any, Auxiliary]]
"""(carry, a row of a stack) -> (the next carry, the layer's share of the model's `Auxiliary`)."""


class Loop(NamedTuple):
    """A loop over consecutive layers, whose iterations compute layers of the same kinds.

    Args:
      stacks: the stack of each layer of an iteration.
      repeats: the number of iterations.
    """

    stacks: tuple[str, ...]
    repeats: int


def stack_of(layer: int, experts: Experts | None) -> str:
    """The stack with the parameters of the layer with this index."""
    return BLOCKS if experts is None or experts.are_in(layer) else DENSE_BLOCKS


def loops_over(num_layers: int, experts: Experts | None) -> tuple[Loop, ...]:
    """The loops that compute all layers, in their order.

    Equal layers are one loop. With `experts.every`, an iteration computes layers up to the next one with experts.

    >>> experts = Experts(num=2, per_token=1, intermediate_size=4, first_dense=3, every=2)
    >>> [loop.repeats for loop in loops_over(9, experts)]
    [2, 3, 1]
    """
    sparse = [layer for layer in range(num_layers) if stack_of(layer, experts) == BLOCKS]
    period = experts.every if experts else 1
    loops = (
        Loop((DENSE_BLOCKS,), sparse[0] + 1 - period),
        Loop((DENSE_BLOCKS,) * (period - 1) + (BLOCKS,), len(sparse)),
        Loop((DENSE_BLOCKS,), num_layers - 1 - sparse[-1]),
    )
    return tuple(loop for loop in loops if loop.repeats)


def run(
    loops: tuple[Loop, ...], stacks: Mapping[str, Any], layers: Mapping[str, Layer], carry: Any, unroll: int
) -> tuple[Any, Auxiliary]:
    """Computes all layers. Returns the last carry, and the sum of the layers' shares.

    Args:
      stacks: name -> tree of arrays [layers of the stack, ...]; rows after them are padding.
      layers: name -> the function of a layer.
      unroll: how many layers an iteration of XLA's loop computes.
    """
    begin = dict.fromkeys(stacks, 0)
    total = Auxiliary({}, {})
    for loop in loops:
        rows = {}
        for stack in dict.fromkeys(loop.stacks):
            group = loop.stacks.count(stack)
            rows[stack] = jax.tree.map(partial(_grouped, begin[stack], loop.repeats, group), stacks[stack])
            begin[stack] += loop.repeats * group
        times = max(1, min(unroll // len(loop.stacks), loop.repeats))
        carry, shares = jax.lax.scan(partial(_iteration, loop, layers), carry, rows, unroll=times)
        for share in shares:
            total = total.plus(jax.tree.map(lambda x: x.sum(0), share))
    return carry, total


def _grouped(begin: int, repeats: int, group: int, x: jax.Array) -> jax.Array:
    """[repeats, group, ...], rows of a stack from `begin`; without the second dim if an iteration has one row."""
    rows = x[begin : begin + repeats * group]
    return rows if group == 1 else rows.reshape(repeats, group, *x.shape[1:])


def _iteration(
    loop: Loop, layers: Mapping[str, Layer], carry: Any, rows: Mapping[str, Any]
) -> tuple[Any, list[Auxiliary]]:
    shares = []
    for i, stack in enumerate(loop.stacks):
        row = rows[stack]
        if loop.stacks.count(stack) > 1:
            row = jax.tree.map(itemgetter(loop.stacks[:i].count(stack)), row)
        carry, share = layers[stack](carry, row)
        shares.append(share)
    return carry, shares
