"""Reads the shardings that XLA prints, and finds the mesh axes that shard each dim."""

from __future__ import annotations

import math
import re

import numpy as np

from meshpar.inspection.program.groups import MESH, iota, named_mesh, numbers
from meshpar.sharding.resolve import AnyMesh

Spec = tuple[tuple[str, ...], ...]
"""For each dim the axes that shard it, the slowest first."""

_TILED = re.compile(
    r"devices=\[(?P<tiles>[\d,]+)\]"
    r"(?:<=\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?|(?P<listed>[\d,]+))"
)
_MESH_DIMS = re.compile(MESH + r", \[(?P<dims>.*?)\]")


def tiles(sharding: str) -> list[np.ndarray] | None:
    """For each dim, the number of the tile that each device holds, as an array over the device numbers.

    Args:
      sharding: `devices=[2,1,4]<=[8] last_tile_dim_replicate`, `mesh['a'=2,'b'=4], [{'a'}, {}]`, or `replicated`, which
        gives an empty list.

    Returns:
      None if the sharding has another form, such as one with parts of axes.

    >>> [tile.tolist() for tile in tiles("devices=[2,1,2]<=[2,2]T(1,0) last_tile_dim_replicate")]
    [[0, 1, 0, 1], [0, 0, 0, 0]]
    """
    if sharding == "replicated":
        return []
    if match := _TILED.match(sharding):
        return _of_tiled(match, sharding)
    if match := _MESH_DIMS.match(sharding):
        return _of_mesh(match)
    return None


def spec(sharding: str, mesh: AnyMesh | None) -> Spec | None:
    """The axes of `mesh` that shard each dim; None if the sharding is not made of whole axes of this mesh.

    >>> from jax.sharding import AbstractMesh
    >>> spec("devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate", AbstractMesh((2, 4), ("data", "tensor")))
    ((), ('tensor',))
    """
    held = tiles(sharding)
    if mesh is None or held is None or any(len(tile) != mesh.size for tile in held):
        return None
    found = [_axes(tile, mesh) for tile in held]
    return None if None in found else tuple(axes for axes in found if axes is not None)


def spec_text(axes: Spec) -> str:
    """The axes as the `PartitionSpec` that a program would contain.

    >>> spec_text(((), ("data", "tensor"), ()))
    "P(None, ('data', 'tensor'))"
    """
    last = max((i for i, of_dim in enumerate(axes, 1) if of_dim), default=0)
    entries = [of_dim[0] if len(of_dim) == 1 else of_dim or None for of_dim in axes[:last]]
    return f"P({', '.join(map(repr, entries))})"


def _of_tiled(match: re.Match[str], sharding: str) -> list[np.ndarray] | None:
    counts = numbers(match["tiles"])
    devices = np.array(numbers(match["listed"])) if match["listed"] else iota(match["shape"], match["order"])
    if math.prod(counts) != devices.size:
        return None
    # The last dims of the tiling can hold copies of the array instead of sharding it.
    subgroups = re.search(r"last_tile_dims=\{([^}]*)\}", sharding)
    copies = len(subgroups[1].split(",")) if subgroups else int("last_tile_dim_replicate" in sharding)
    return _places(devices, counts)[: len(counts) - copies]


def _of_mesh(match: re.Match[str]) -> list[np.ndarray] | None:
    if re.search(r"'\s*:", match["dims"]):
        return None  # 'a':(1)2 is a part of axis a
    sizes, devices = named_mesh(match)
    index = dict(zip(sizes, _places(devices, tuple(sizes.values())), strict=True))
    found = []
    for dim in re.findall(r"\{([^}]*)\}", match["dims"]):
        tile = np.zeros(devices.size, int)
        for axis in re.findall(r"'([^']+)'", dim):
            tile = tile * sizes[axis] + index[axis]
        found.append(tile)
    return found


def _places(devices: np.ndarray, counts: tuple[int, ...]) -> list[np.ndarray]:
    """For each dim of a grid of shape `counts` that contains `devices`, the index of each device."""
    return list(np.unravel_index(np.argsort(devices.ravel()), counts))


def _axes(tile: np.ndarray, mesh: AnyMesh) -> tuple[str, ...] | None:
    """The axes along which the tile number counts up, the slowest first; None if it does not count along axes."""
    grid = tile.reshape(tuple(mesh.shape.values()))
    steps = {axis: int(grid.take(-1, i).flat[0]) // (n - 1) for i, (axis, n) in enumerate(mesh.shape.items()) if n > 1}
    axes = sorted((axis for axis, step in steps.items() if step), key=lambda axis: steps[axis], reverse=True)
    order = [mesh.axis_names.index(axis) for axis in axes]
    counted = np.arange(math.prod(mesh.shape[axis] for axis in axes)).reshape([mesh.shape[axis] for axis in axes])
    same = np.expand_dims(counted.transpose(np.argsort(order)), [i for i in range(grid.ndim) if i not in order])
    return tuple(axes) if (grid == same).all() else None
