"""Gradients that are copied on several devices, summed in buckets, as a declared `Reduce` says.

Those that lie alike are one stream, in the order in which the backward makes them, and a bucket is its next so many
elements. A bucket is sent when its last gradient is there; a large gradient fills several.
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
from meshpar.parallel.local import Axes, varies_over

PASSES_ON = {"convert_element_type", "copy", "pvary", "reshape", "transpose", "mul", "div"}
"""What may follow on a gradient once it is made."""


class Piece(NamedTuple):
    """Elements of one gradient, flat: from start to stop."""

    gradient: int
    start: int
    stop: int


@dataclass(frozen=True)
class Copied:
    """A gradient before it is summed over the devices that have a part of it.

    Args:
      inside: axes of the copies inside a slice.
      slow: axes of those in other slices.
      state: what the last step left of it; empty if there is none.
    """

    value: jax.Array
    inside: Axes
    slow: Axes
    state: State


def buckets(sizes: Sequence[int], bucket_size: int) -> list[list[Piece]]:
    """A stream of gradients, cut into buckets of so many elements; the last has the rest.

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
    """The sum of each, and what the next step gets.

    Args:
      order: of the gradients, that which is made first comes first.
      key: for stochastic rounding.

    Communication: that of `Reduce.sum` for each bucket.
    """
    summed: dict[int, tuple[jax.Array, State]] = {i: (g.value, {}) for i, g in enumerate(gradients)}
    for number, stream in enumerate(_streams(gradients, order)):
        of = [gradients[i] for i in stream]
        one = None if key is None else jax.random.fold_in(key, number)
        results = _fused(of, reduction, one) if reduction.fuses else [_alone(g, reduction, one) for g in of]
        summed.update(zip(stream, results, strict=True))
    return [summed[i] for i in range(len(gradients))]


def _streams(gradients: list[Copied], order: Sequence[int]) -> Iterator[list[int]]:
    """Those with the same copies, that vary over the same axes and are of one dtype."""
    streams: dict[Any, list[int]] = {}
    for i in order:
        g = gradients[i]
        if g.inside or g.slow:
            streams.setdefault((g.inside, g.slow, varies_over(g.value), g.value.dtype), []).append(i)
    yield from streams.values()


def _alone(g: Copied, reduction: Reduce, key: jax.Array | None) -> tuple[jax.Array, State]:
    return reduction.sum(g.value, g.inside, g.slow, g.state, key)


def _fused(of: list[Copied], reduction: Reduce, key: jax.Array | None) -> list[tuple[jax.Array, State]]:
    pieces = buckets([g.value.size for g in of], reduction.bucket_size(of[0].value.dtype.itemsize))
    join = lambda bucket, get: jnp.concatenate([get(of[p.gradient]).reshape(-1)[p.start : p.stop] for p in bucket])
    parts: list[list[tuple[jax.Array, State]]] = [[] for _ in of]
    for number, bucket in enumerate(pieces):
        state = {name: join(bucket, lambda g, name=name: g.state[name]) for name in of[0].state}
        one = None if key is None else jax.random.fold_in(key, number)
        total, kept = reduction.sum(join(bucket, lambda g: g.value), of[0].inside, of[0].slow, state, one)
        at = 0
        for gradient, start, stop in bucket:
            cut = slice(at, at + stop - start)
            parts[gradient].append((total[cut], {name: lost[cut] for name, lost in kept.items()}))
            at += stop - start
    return [_whole(pieces, g.value.shape) for pieces, g in zip(parts, of, strict=True)]


def _whole(pieces: list[tuple[jax.Array, State]], shape: tuple[int, ...]) -> tuple[jax.Array, State]:
    whole = lambda cut: jnp.concatenate(cut).reshape(shape)
    return whole([total for total, _ in pieces]), {
        name: whole([state[name] for _, state in pieces]) for name in pieces[0][1]
    }


def order_of(gradients: Callable[..., Any], *arguments: Any) -> list[int]:
    """The leaves of what a function returns, in the order in which it makes them.

    Args:
      gradients: traced once more, for this alone.
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
