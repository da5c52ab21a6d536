"""Sends arrays between the devices of a group, whose mesh axes may be in any order."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import numpy as np
from jax import lax

from meshpar.mesh.varying import Axes


def permute(x: jax.Array, axes: Axes, pairs: Iterable[tuple[int, int]]) -> jax.Array:
    """Sends `x` from device to device, within a `shard_map`. A device that receives nothing gets zeros.

    A rank is the index along `axes`, the first axis slowest, as in `lax.axis_index`. `lax.ppermute` instead numbers the
    devices by the mesh's order of the axes; JAX 0.12 refuses axes in another order, and earlier releases ignore it.

    Args:
      axes: mesh axes of the group, all manual.
      pairs: (source, target) ranks; no two with the same source or the same target.

    Communication: one `x` per pair.
    """
    ordered = tuple(axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in axes)
    sizes = [lax.axis_size(axis) for axis in ordered]
    devices = np.arange(np.prod(sizes)).reshape(sizes).transpose([ordered.index(axis) for axis in axes]).reshape(-1)
    return lax.ppermute(x, ordered, [(int(devices[source]), int(devices[target])) for source, target in pairs])
