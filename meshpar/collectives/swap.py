"""Exchanges arrays between pairs of devices, by collectives of two devices each.

A permute waits for all devices of the mesh, on CPUs and GPUs. Stages of a pipeline run different operations at a time,
so inside of them devices meet in pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

from meshpar.mesh.varying import Axes


def pairings(num: int) -> list[list[int]]:
    """Rounds of an even number of members; after all of them each has met each other once. A round is their partners.

    >>> pairings(4)
    [[3, 2, 1, 0], [2, 3, 0, 1], [1, 0, 3, 2]]
    """
    rounds = []
    for last in range(num - 1):  # the partner of the last member; the others sit in a circle around it
        partner = {last: num - 1, num - 1: last}
        for apart in range(1, num // 2):
            one, other = (last + apart) % (num - 1), (last - apart) % (num - 1)
            partner |= {one: other, other: one}
        rounds.append([partner[member] for member in range(num)])
    return rounds


def swap(x: jax.Array, axes: Axes, partners: Sequence[int], group: int = 1) -> jax.Array:
    """Returns the partner's `x`, within a `shard_map`.

    Args:
      axes: mesh axes, of size `group` times the number of members.
      partners: the partner of each member.
      group: neighbouring devices of a member; each meets the device at its own place in the partner's group.

    Communication: one `x` to the partner, by an all-gather of the pair.
    """
    pairs = [(one, other) for one, other in enumerate(partners) if one < other]
    groups = [[one * group + place, other * group + place] for place in range(group) for one, other in pairs]
    both = lax.all_gather(x, axes, axis_index_groups=groups)
    member = lax.axis_index(axes) // group
    is_first = member < jax.numpy.asarray(np.asarray(partners, np.int32))[member]
    return lax.dynamic_index_in_dim(both, is_first.astype("int32"), keepdims=False)
