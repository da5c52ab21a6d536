"""Parses the replica groups of collectives, in every form that XLA prints, and finds the mesh axes that they span.

The number of a device in a program is its position in the flattened array of the mesh's devices, not its id.
"""

from __future__ import annotations

import itertools
import math
import re

import numpy as np

from meshpar.errors import ProgramError
from meshpar.sharding.resolve import AnyMesh

Groups = tuple[tuple[int, ...], ...]

_LISTED = re.compile(r"\{((?:\{[\d, ]+\},?\s*)+)\}$")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
MESH = r"mesh\[(?P<sizes>[^\]]*)\](?:, device_ids=\(\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?\))?"
"""A regular expression for the mesh that XLA prints before groups and shardings; `named_mesh` reads its match."""
_MESH_GROUPS = re.compile(MESH + r" ?\{(?P<axes>(?:'[^':]+'(?::\(\d+\)\d+)?,? ?)*)\}$")
_FORM = r"\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh\[.*?\}"


def find_groups(attributes: str, name: str, num_devices: int) -> Groups:
    """The groups after `name=` in the attributes of an instruction; for a permute, the pairs (source, target).

    Raises:
      ProgramError: there are no groups, they have an unknown form, or they name a device that the program lacks.

    >>> find_groups("%p), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}", "replica_groups", 4)
    ((0, 1), (2, 3))
    """
    match = re.search(rf"\b{name}=({_FORM})(?=[,\s]|$)", attributes)
    if not match:
        raise ProgramError(f"no {name} of a known form in: {attributes[:200]}")
    if name == "source_target_pairs" and match[1] == "{}":
        return ()
    groups = parse_groups(match[1], num_devices)
    if any(number >= num_devices for group in groups for number in group):
        raise ProgramError(f"{name}={match[1]} names a device that a program of {num_devices} devices does not have")
    return groups


def parse_groups(text: str, num_devices: int) -> Groups:
    """Parses groups of device numbers.

    Args:
      text: `{{0,1},{2,3}}`, `[2,4]<=[8]`, `[2,4]<=[4,2]T(1,0)`, `mesh['a'=2,'b'=4] {'a'}`, the same with
        `, device_ids=([4,2]T(1,0))` after the bracket; `'b':(2)2` for the part of an axis that has size 2 below parts
        of size 2; or `{}` for one group of all devices.

    Raises:
      ProgramError: the text has another form.

    >>> parse_groups("[2,2]<=[2,2]T(1,0)", 4)
    ((0, 2), (1, 3))
    >>> parse_groups("mesh['a'=4] {'a':(1)2}", 4)
    ((0, 2), (1, 3))
    """
    if text == "{}":
        return (tuple(range(num_devices)),)
    if match := _LISTED.match(text):
        return tuple(numbers(group) for group in re.findall(r"\{([\d, ]*)\}", match[1]))
    if match := _IOTA.match(text):
        return _rows(iota(match[2], match[3]).reshape(numbers(match[1])))
    if match := _MESH_GROUPS.match(text):
        # A group for each index of the axes that are not named. Within a group the first named axis varies slowest.
        sizes, devices = named_mesh(match)
        sizes, axes = _split(sizes, re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", match["axes"]))
        order = [list(sizes).index(axis) for axis in (*(name for name in sizes if name not in axes), *axes)]
        grid = devices.reshape(list(sizes.values())).transpose(order)
        return _rows(grid.reshape(-1, math.prod(sizes[axis] for axis in axes)))
    raise ProgramError(f"replica groups of an unknown form: {text}")


def _split(sizes: dict[str, int], parts: list[tuple[str, str, str]]) -> tuple[dict[str, int], list[str]]:
    """The mesh with each axis cut into the parts that groups name, and the names of these parts.

    Args:
      parts: (axis, product of the sizes of the parts before, size); without sizes the whole axis.
    """
    cuts: dict[str, set[int]] = {axis: {1, size} for axis, size in sizes.items()}
    for axis, before, size in parts:
        cuts[axis] |= {int(before or 1), int(before or 1) * int(size or sizes[axis])}
    bounds = {axis: sorted(found) for axis, found in cuts.items()}
    split = {
        f"{axis}/{low}": high // low for axis, found in bounds.items() for low, high in itertools.pairwise(found)
    } | {f"{axis}/1": 1 for axis, size in sizes.items() if size == 1}
    named = [
        f"{axis}/{low}"
        for axis, before, size in parts
        for low in bounds[axis][:-1]
        if int(before or 1) <= low < int(before or 1) * int(size or sizes[axis])
    ]
    return split, named


def spanned_axes(groups: Groups, mesh: AnyMesh) -> tuple[str, ...]:
    """The axes along which any two devices of a group differ."""
    indices = np.stack(np.unravel_index(np.arange(mesh.size), tuple(mesh.shape.values())), axis=1)
    differ = np.zeros(len(mesh.axis_names), bool)
    for group in groups:
        differ |= (indices[list(group)] != indices[group[0]]).any(axis=0)
    return tuple(itertools.compress(mesh.axis_names, differ))


def are_parts(groups: Groups, mesh: AnyMesh) -> bool:
    """Whether a group has only some of the devices along its axes, such as the neighbours of one host."""
    size = math.prod(mesh.shape[axis] for axis in spanned_axes(groups, mesh))
    return any(len(set(group)) < size for group in groups)


def iota(shape: str, order: str | None) -> np.ndarray:
    """The device numbers of `[4,2]T(1,0)`: 0, 1, 2, ... in an array of `shape`, transposed by `order`."""
    counted = np.arange(math.prod(numbers(shape))).reshape(numbers(shape))
    return counted.transpose(numbers(order)) if order else counted


def named_mesh(match: re.Match[str]) -> tuple[dict[str, int], np.ndarray]:
    """The sizes of the axes of a mesh that `MESH` matched, and its device numbers."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match["sizes"])}
    return sizes, iota(match["shape"] or str(math.prod(sizes.values())), match["order"])


def _rows(devices: np.ndarray) -> Groups:
    return tuple(map(tuple, devices.tolist()))


def numbers(text: str) -> tuple[int, ...]:
    """The numbers in a text.

    >>> numbers("[4,2]")
    (4, 2)
    """
    return tuple(int(number) for number in re.findall(r"\d+", text))
