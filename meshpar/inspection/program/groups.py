"""Replica groups of a collective, in every form in which XLA prints them, and the mesh axes that they span.

A device's number in a program is its place in the mesh's flattened array of devices, whatever its own id.
"""

from __future__ import annotations

import math
import re

import numpy as np

from meshpar.errors import ProgramError
from meshpar.sharding.resolve import AnyMesh

Groups = tuple[tuple[int, ...], ...]

_LISTED = re.compile(r"\{((?:\{[\d, ]+\},?\s*)+)\}$")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH = re.compile(
    r"mesh\[(?P<sizes>[^\]]*)\](?:, device_ids=\(\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?\))?"
    r" ?\{(?P<axes>(?:'[^':]+',? ?)*)\}$"
)
_FORM = r"\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh\[.*?\}"


def find_groups(attributes: str, name: str, num_devices: int) -> Groups:
    """Groups that an instruction's attributes give as `name=`; for a permute's pairs, (from, to).

    Raises:
      ProgramError: there are none, or of an unknown form, or for more devices.

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
        raise ProgramError(f"{name}={match[1]} names a device that a program of {num_devices} does not have")
    return groups


def parse_groups(text: str, num_devices: int) -> Groups:
    """Groups of device numbers.

    Args:
      text: `{{0,1},{2,3}}`, `[2,4]<=[8]`, `[2,4]<=[4,2]T(1,0)`, `mesh['a'=2,'b'=4] {'a'}`, the same with
        `, device_ids=([4,2]T(1,0))` after the bracket, or `{}` for one group of all.

    Raises:
      ProgramError: it has another form, as a mesh's with parts of axes.

    >>> parse_groups("[2,2]<=[2,2]T(1,0)", 4)
    ((0, 2), (1, 3))
    """
    if text == "{}":
        return (tuple(range(num_devices)),)
    if match := _LISTED.match(text):
        return tuple(numbers(group) for group in re.findall(r"\{([\d, ]*)\}", match[1]))
    if match := _IOTA.match(text):
        return _rows(iota(match[2], match[3]).reshape(numbers(match[1])))
    if match := _MESH.match(text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match["sizes"])}
        shape = match["shape"] or str(math.prod(sizes.values()))
        return _mesh_groups(sizes, iota(shape, match["order"]), re.findall(r"'([^']+)'", match["axes"]))
    raise ProgramError(f"replica groups of an unknown form: {text}")


def spanned_axes(groups: Groups, mesh: AnyMesh) -> tuple[str, ...] | None:
    """The axes, none of size 1, along which the devices of a group differ; None if a group is but a part of those."""
    axes = differing_axes(groups, mesh)
    size = math.prod(mesh.shape[axis] for axis in axes)
    return axes if all(len(set(group)) == size for group in groups) else None


def differing_axes(groups: Groups, mesh: AnyMesh) -> tuple[str, ...]:
    """The axes along which any two devices of a group differ."""
    indices = np.stack(np.unravel_index(np.arange(mesh.size), tuple(mesh.shape.values())), axis=1)
    differ = np.zeros(len(mesh.axis_names), bool)
    for group in groups:
        differ |= (indices[list(group)] != indices[group[0]]).any(axis=0)
    return tuple(axis for axis, does in zip(mesh.axis_names, differ, strict=True) if does)


def iota(shape: str, order: str | None) -> np.ndarray:
    """Device numbers as `[4,2]T(1,0)` lays them out: counted up in `shape`, then transposed."""
    counted = np.arange(math.prod(numbers(shape))).reshape(numbers(shape))
    return counted.transpose(numbers(order)) if order else counted


def _mesh_groups(sizes: dict[str, int], devices: np.ndarray, axes: list[str]) -> Groups:
    """A group for each index of the axes that are not named; within it, the first named varies slowest."""
    order = [*(name for name in sizes if name not in axes), *axes]
    grid = devices.reshape(list(sizes.values())).transpose([list(sizes).index(name) for name in order])
    return _rows(grid.reshape(-1, math.prod(sizes[name] for name in axes)))


def _rows(devices: np.ndarray) -> Groups:
    return tuple(tuple(int(number) for number in row) for row in devices)


def numbers(text: str) -> tuple[int, ...]:
    """The numbers in a text.

    >>> numbers("[4,2]")
    (4, 2)
    """
    return tuple(int(number) for number in re.findall(r"\d+", text))
