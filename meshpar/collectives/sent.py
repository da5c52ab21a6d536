"""What tables send over mesh axes: the closed forms to which compiled programs are held."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from meshpar.collectives.algorithms import plan
from meshpar.collectives.choose import choose
from meshpar.collectives.compress import Message
from meshpar.collectives.operations import Choice
from meshpar.collectives.plan import Permute
from meshpar.mesh.layout import AXES

Axes = tuple[str, ...]
Sizes = Mapping[str, int]
"""Axis -> devices along it."""
Sent = Counter[Axes]
"""Axes, in the order of the mesh -> bytes that a device sends over them; in each permute, the one that sends most."""


def sent(messages: Iterable[Message], axes: Axes, sizes: Sizes, algorithm: Choice = "auto") -> Sent:
    """What a device sends in some collectives over `axes`.

    >>> from meshpar.collectives.compress import Message
    >>> sent([Message("all_reduce", 100, 4)], ("data",), {"data": 8})
    Counter({('data',): 728})
    """
    total, num_ranks = Sent(), ranks_of(axes, sizes)
    for operation, size, width in messages:
        name = choose(operation, num_ranks, size * width) if algorithm == "auto" else algorithm
        table = plan(operation, name, num_ranks)
        chunk = math.ceil(size / table.num_chunks) * width
        for permute in table.permutes():
            total[_spanned(permute, axes, sizes)] += permute.chunks.shape[1] * chunk
    return total


def ranks_of(axes: Axes, sizes: Sizes) -> int:
    """n, of a group along `axes`."""
    return math.prod(sizes[axis] for axis in axes)


def _spanned(permute: Permute, axes: Axes, sizes: Sizes) -> Axes:
    """The axes along which any source differs from its target."""
    shape = tuple(sizes[axis] for axis in axes)
    places = (np.unravel_index(ranks, shape) for ranks in (permute.source, permute.target))
    differ = {axis for axis, a, b in zip(axes, *places, strict=True) if (a != b).any()}
    return tuple(axis for axis in AXES if axis in differ)
