"""XLA's shardings as `PartitionSpec`s: which mesh axes cut each dim, from any form in which XLA prints it."""

from __future__ import annotations

import math
import re

import numpy as np

from meshpar.inspection.program.groups import iota, numbers
from meshpar.sharding.resolve import AnyMesh

Spec = tuple[tuple[str, ...], ...]
"""For each dim the axes that cut it, the one that varies slowest first."""

_TILED = re.compile(
    r"devices=\[(?P<tiles>[\d,]+)\]"
    r"(?:<=\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?|(?P<listed>[\d,]+))"
)
_MESH = re.compile(
    r"mesh\[(?P<sizes>[^\]]*)\](?:, device_ids=\(\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?\))?"
    r", \[(?P<dims>.*?)\]"
)


def tiles(sharding: str) -> list[np.ndarray] | None:
    """For each dim, the number of the tile that each device holds, as an array over the devices by number.

    Args:
      sharding: `devices=[2,1,4]<=[8] last_tile_dim_replicate`, `mesh['a'=2,'b'=4], [{'a'}, {}]`, or `replicated`, which
        cuts no dim.

    Returns:
      None if the sharding has another form, as one with parts of axes.

    >>> [tile.tolist() for tile in tiles("devices=[2,1,2]<=[2,2]T(1,0) last_tile_dim_replicate")]
    [[0, 1, 0, 1], [0, 0, 0, 0]]
    """
    if sharding == "replicated":
        return []
    if match := _TILED.match(sharding):
        return _of_tiled(match, sharding)
    if match := _MESH.match(sharding):
        return _of_mesh(match)
    return None


def spec(sharding: str, mesh: AnyMesh | None) -> Spec | None:
    """The axes of `mesh` that cut each dim; None if the sharding is not one of whole axes of this mesh.

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
    """As it is written in a program.

    >>> spec_text(((), ("data", "tensor"), ()))
    "P(None, ('data', 'tensor'))"
    """
    entries = [repr(one if len(one) > 1 else one[0] if one else None) for one in axes]
    while entries and entries[-1] == "None":
        entries.pop()
    return f"P({', '.join(entries)})"


def _of_tiled(match: re.Match[str], sharding: str) -> list[np.ndarray] | None:
    counts = numbers(match["tiles"])
    devices = np.array(numbers(match["listed"])) if match["listed"] else iota(match["shape"], match["order"])
    if math.prod(counts) != devices.size:
        return None
    # The last dims of the tiling can hold copies, and cut nothing.
    subgroups = re.search(r"last_tile_dims=\{([^}]*)\}", sharding)
    copies = len(subgroups[1].split(",")) if subgroups else int("last_tile_dim_replicate" in sharding)
    return _places(devices, counts)[: len(counts) - copies]


def _of_mesh(match: re.Match[str]) -> list[np.ndarray] | None:
    if re.search(r"'\s*:", match["dims"]):
        return None  # 'a':(1)2 is a part of axis a
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match["sizes"])}
    devices = iota(match["shape"] or str(math.prod(sizes.values())), match["order"])
    index = dict(zip(sizes, _places(devices, tuple(sizes.values())), strict=True))
    dims = [re.findall(r"'([^']+)'", dim) for dim in re.findall(r"\{([^}]*)\}", match["dims"])]
    nothing = np.zeros(devices.size, int)
    return [sum((_stride(axes, axis, sizes) * index[axis] for axis in axes), nothing) for axes in dims]


def _places(devices: np.ndarray, counts: tuple[int, ...]) -> list[np.ndarray]:
    """For each dim of a grid of `counts`, filled with `devices`, where each device stands."""
    return list(np.unravel_index(np.argsort(devices.ravel()), counts))


def _stride(axes: list[str], axis: str, sizes: dict[str, int]) -> int:
    return math.prod(sizes[after] for after in axes[axes.index(axis) + 1 :])


def _axes(tile: np.ndarray, mesh: AnyMesh) -> tuple[str, ...] | None:
    """The axes along which the tile's number counts up, the slowest first; None if it is no such count."""
    grid = tile.reshape(tuple(mesh.shape.values()))
    steps = {axis: int(grid.take(-1, i).flat[0]) // (n - 1) for i, (axis, n) in enumerate(mesh.shape.items()) if n > 1}
    axes = sorted((axis for axis, step in steps.items() if step), key=lambda axis: steps[axis], reverse=True)
    order = [mesh.axis_names.index(axis) for axis in axes]
    counted = np.arange(math.prod(mesh.shape[axis] for axis in axes)).reshape([mesh.shape[axis] for axis in axes])
    same = np.expand_dims(counted.transpose(np.argsort(order)), [i for i in range(grid.ndim) if i not in order])
    return tuple(axes) if (grid == same).all() else None
