"""The bytes that collectives send, by the formulas of the tables and the papers.

An oracle for traced and compiled programs. It reads the tables (`plan`), which their own tests compare with the
textbooks, and the bits of each code; it runs and traces nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from meshpar.collectives import Float8, Int8, OneBit, PowerSGD
from meshpar.collectives.algorithms import plan
from meshpar.collectives.operations import Choice
from meshpar.collectives.plan import Operation, Permute
from meshpar.collectives.reduction import Bfloat16, Reduce, Within
from meshpar.collectives.select import select
from meshpar.mesh.layout import AXES

Axes = tuple[str, ...]
Sizes = Mapping[str, int]
"""Axis -> devices along it."""
Sent = Mapping[Axes, Fraction]
"""Axes, in the order of the mesh -> bytes that a device sends over them, on average over all devices."""
CODES = (Int8, Float8, OneBit)
SCALE_BYTES = 4


class Message(NamedTuple):
    """One collective.

    Args:
      size: elements of the whole buffer.
      width: bytes of each.
    """

    operation: Operation
    size: int
    width: int


def sent(messages: Iterable[Message], axes: Axes, sizes: Sizes, algorithm: Choice = "auto") -> Sent:
    """The bytes that a device sends in `messages` over `axes`.

    >>> sent([Message("all_reduce", 100, 4)], ("data",), {"data": 8})
    {('data',): Fraction(728, 1)}
    """
    total: dict[Axes, Fraction] = {}
    num_ranks = ranks_of(axes, sizes)
    for operation, size, width in messages:
        name = select(operation, num_ranks, size * width) if algorithm == "auto" else algorithm
        table = plan(operation, name, num_ranks)
        chunk = math.ceil(size / table.num_chunks) * width
        for permute in table.permutes():
            num_sent = permute.chunks[permute.source != permute.target].size
            spanned = _spanned(permute, axes, sizes)
            total[spanned] = total.get(spanned, Fraction(0)) + Fraction(num_sent * chunk, num_ranks)
    return total


def ranks_of(axes: Axes, sizes: Sizes) -> int:
    """The number of ranks in a group along `axes`."""
    return math.prod(sizes[axis] for axis in axes)


def part_bytes(code: Int8 | Float8 | OneBit, size: int, num_ranks: int) -> int:
    """Bytes of a rank's part of `size` elements: whole blocks, each with a float32 scale.

    >>> part_bytes(Int8(), 4000, 4), part_bytes(OneBit(block=64), 4000, 4)
    (1040, 192)
    """
    bits = 1 if isinstance(code, OneBit) else 8
    return math.ceil(math.ceil(size / num_ranks) / code.block) * (code.block * bits // 8 + SCALE_BYTES)


def all_reduce_messages(code: Int8 | Float8 | OneBit | PowerSGD, shape: Sequence[int], num_ranks: int) -> list[Message]:
    """A coded sum exchanges parts and gathers the summed parts; PowerSGD sums two thin matrices."""
    if isinstance(code, PowerSGD):
        rows = math.prod(shape[:-1])
        columns = shape[-1]
        rank = min(code.rank, rows, columns)
        return [Message("all_reduce", rows * rank, 4), Message("all_reduce", columns * rank, 4)]
    coded = num_ranks * part_bytes(code, math.prod(shape), num_ranks)
    return [Message("all_to_all", coded, 1), Message("all_gather", coded, 1)]


def scatter_sent(of: Reduce, size: int, width: int, axes: Axes, sizes: Sizes) -> Sent:
    """The bytes that a device sends in `Reduce.scatter` of `size` elements."""
    message = _within_message(of.within, "reduce_scatter", size, width, ranks_of(axes, sizes))
    return sent([message], axes, sizes, of.algorithm)


def sum_sent(of: Reduce, shape: tuple[int, ...], width: int, inside: Axes, slow: Axes, sizes: Sizes) -> Sent:
    """The bytes that a device sends in `Reduce.sum` of a bucket: scatter inside a slice, sum across, gather inside."""
    if isinstance(of.across, PowerSGD) or not inside:
        return _across_sent(of, shape, width, inside + slow, sizes)
    num_ranks = ranks_of(inside, sizes)
    part = math.ceil(math.prod(shape) / num_ranks)
    scatter = _within_message(of.within, "reduce_scatter", part * num_ranks, width, num_ranks)
    gather = _within_message(of.within, "all_gather", part * num_ranks, width, num_ranks)
    around = sent([scatter, gather], inside, sizes, of.algorithm)
    across = _across_sent(of, (part,), width, slow, sizes) if slow else {}
    return {axes: around.get(axes, Fraction(0)) + across.get(axes, Fraction(0)) for axes in [*around, *across]}


def bucket_shapes(shapes: Sequence[tuple[int, ...]], of: Reduce, width: int) -> list[tuple[int, ...]]:
    """The shapes of the buckets of one stream, which do not depend on the order of its arrays."""
    if isinstance(of.across, PowerSGD):
        return list(shapes)
    total = sum(map(math.prod, shapes))
    size = of.bucket_size(width)
    rest = [(total % size,)] if total % size else []
    return [(size,)] * (total // size) + rest


def _across_sent(of: Reduce, shape: tuple[int, ...], width: int, axes: Axes, sizes: Sizes) -> Sent:
    if isinstance(of.across, (*CODES, PowerSGD)):
        messages = all_reduce_messages(of.across, shape, ranks_of(axes, sizes))
    else:
        messages = [Message("all_reduce", math.prod(shape), 2 if isinstance(of.across, Bfloat16) else width)]
    return sent(messages, axes, sizes, of.algorithm)


def _within_message(within: Within, operation: Operation, size: int, width: int, num_ranks: int) -> Message:
    if not isinstance(within, CODES):
        return Message(operation, size, 2 if isinstance(within, Bfloat16) else width)
    coded = num_ranks * part_bytes(within, size, num_ranks)
    return Message("all_to_all" if operation == "reduce_scatter" else operation, coded, 1)


def _spanned(permute: Permute, axes: Axes, sizes: Sizes) -> Axes:
    """The axes along which any source differs from its target."""
    shape = tuple(sizes[axis] for axis in axes)
    places = (np.unravel_index(ranks, shape) for ranks in (permute.source, permute.target))
    differ = {axis for axis, a, b in zip(axes, *places, strict=True) if (a != b).any()}
    return tuple(axis for axis in AXES if axis in differ)
