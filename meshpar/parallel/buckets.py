"""Sums the gradients of replicated parameters over devices, in buckets, as a declared `Reduce` specifies.

Gradients with the same copies, varying axes and dtype form a stream, in the order in which the backward computes them.
A stream is cut into buckets of equal size. A bucket is sent once its last gradient is computed; a large gradient fills
several buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from meshpar.collectives.compression import State
from meshpar.collectives.reduction import Reduce
from meshpar.mesh.varying import Axes, varies_over

PASSES_ON = {"convert_element_type", "copy", "pvary", "reshape", "transpose", "mul", "div"}
"""Operations on a gradient that do not change when it counts as computed."""


class Piece(NamedTuple):
    """A range of elements of one flattened gradient: from start to stop."""

    gradient: int
    start: int
    stop: int


@dataclass(frozen=True)
class Copied:
    """A gradient before it is summed over the devices that hold a partial sum of it.

    Args:
      inside: the axes to sum over inside a slice.
      slow: the axes to sum over that cross slices.
      state: the reduction's state for this gradient after the last step; empty if it has none.
    """

    value: jax.Array
    inside: Axes
    slow: Axes
    state: State


def buckets(sizes: Sequence[int], bucket_size: int) -> list[list[Piece]]:
    """Cuts a stream of gradients of these sizes into buckets of `bucket_size` elements; the last bucket has the rest.

    >>> buckets([3, 5], 4)
    [[Piece(gradient=0, start=0, stop=3), Piece(gradient=1, start=0, stop=1)], [Piece(gradient=1, start=1, stop=5)]]
    """
    cut: list[list[Piece]] = []
    room = 0
    for gradient, size in enumerate(sizes):
        start = 0
        while start < size:
            if not room:
                cut.append([])
                room = bucket_size
            stop = min(size, start + room)
            cut[-1].append(Piece(gradient, start, stop))
            room -= stop - start
            start = stop
    return cut


def sum_copies(
    gradients: list[Copied], order: Sequence[int], reduction: Reduce, key: jax.Array | None
) -> list[tuple[jax.Array, State]]:
    """Sums each gradient over its copies; returns the sums and the states for the next step.

    Args:
      order: the indices of the gradients, in the order in which the backward computes them.
      key: for stochastic rounding.

    Communication: that of `Reduce.sum`, for each bucket.
    """
    summed: dict[int, tuple[jax.Array, State]] = {i: (g.value, {}) for i, g in enumerate(gradients)}
    for number, stream in enumerate(_streams(gradients, order)):
        copied = [gradients[i] for i in stream]
        stream_key = None if key is None else jax.random.fold_in(key, number)
        if reduction.fuses:
            results = _fused(copied, reduction, stream_key)
        else:
            results = [reduction.sum(g.value, g.inside, g.slow, g.state, stream_key) for g in copied]
        summed.update(zip(stream, results, strict=True))
    return [summed[i] for i in range(len(gradients))]


def _streams(gradients: list[Copied], order: Sequence[int]) -> Iterator[list[int]]:
    """The indices of gradients that have the same copies, varying axes and dtype."""
    streams: dict[Any, list[int]] = {}
    for i in order:
        g = gradients[i]
        if g.inside or g.slow:
            streams.setdefault((g.inside, g.slow, varies_over(g.value), g.value.dtype), []).append(i)
    yield from streams.values()


def _fused(gradients: list[Copied], reduction: Reduce, key: jax.Array | None) -> list[tuple[jax.Array, State]]:
    first = gradients[0]
    parts: list[list[tuple[jax.Array, State]]] = [[] for _ in gradients]
    sizes = [g.value.size for g in gradients]
    for number, bucket in enumerate(buckets(sizes, reduction.bucket_size(first.value.dtype.itemsize))):
        state = {name: _join(bucket, [g.state[name] for g in gradients]) for name in first.state}
        bucket_key = None if key is None else jax.random.fold_in(key, number)
        values = _join(bucket, [g.value for g in gradients])
        total, new_state = reduction.sum(values, first.inside, first.slow, state, bucket_key)
        at = 0
        for gradient, start, stop in bucket:
            cut = slice(at, at + stop - start)
            parts[gradient].append((total[cut], {name: x[cut] for name, x in new_state.items()}))
            at += stop - start
    summed: list[tuple[jax.Array, State]] = []
    for pieces, g in zip(parts, gradients, strict=True):
        total = jnp.concatenate([total for total, _ in pieces]).reshape(g.value.shape)
        states = {name: [state[name] for _, state in pieces] for name in pieces[0][1]}
        summed.append((total, {name: jnp.concatenate(x).reshape(g.value.shape) for name, x in states.items()}))
    return summed


def _join(bucket: list[Piece], arrays: list[jax.Array]) -> jax.Array:
    return jnp.concatenate([arrays[piece.gradient].reshape(-1)[piece.start : piece.stop] for piece in bucket])


def order_of(gradients: Callable[..., Any], *arguments: Any) -> list[int]:
    """The indices of the leaves that a function returns, in the order in which it computes them.

    Args:
      gradients: the function; it is traced an additional time for this.
    """
    jaxpr = jax.make_jaxpr(gradients)(*arguments).jaxpr
    made = {var: i for i, equation in enumerate(jaxpr.eqns) for var in equation.outvars}

    def when(var: Any) -> int:
        while (at := made.get(var, -1)) >= 0 and jaxpr.eqns[at].primitive.name in PASSES_ON:
            var = jaxpr.eqns[at].invars[0]
            if isinstance(var, Literal):
                break
        return at

    times = [-1 if isinstance(var, Literal) else when(var) for var in jaxpr.outvars]
    return sorted(range(len(times)), key=times.__getitem__)
