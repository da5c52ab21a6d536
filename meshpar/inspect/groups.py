"""Replica groups of a collective, in every form in which XLA prints them."""

from __future__ import annotations

import re

import numpy as np

from meshpar.errors import ProgramError

Groups = tuple[tuple[int, ...], ...]

_LISTED = re.compile(r"\{((?:\{[\d, ]*\},?\s*)*)\}$")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(?\[?([\d,<=\[\]T()]+)\)?)?\s*\{([^}]*)\}$")


def parse_groups(text: str, num_devices: int) -> Groups:
    """Groups of device numbers.

    Args:
      text: `{{0,1},{2,3}}`, `[2,4]<=[8]`, `[2,4]<=[4,2]T(1,0)`, `mesh['a'=2,'b'=4] {'a'}`, or `{}` for one
        group of all.

    Raises:
      ProgramError: it has another form.

    >>> parse_groups("[2,2]<=[2,2]T(1,0)", 4)
    ((0, 2), (1, 3))
    """
    text = text.strip()
    if text == "{}":
        return (tuple(range(num_devices)),)
    if match := _LISTED.match(text):
        return tuple(_numbers(group) for group in re.findall(r"\{([\d, ]*)\}", match[1]))
    if match := _IOTA.match(text):
        return _groups(_iota(_numbers(match[2]), match[3]).reshape(_numbers(match[1])))
    if (match := _MESH.match(text)) and match[2] is None:
        return _mesh_groups(match[1], match[3])
    raise ProgramError(f"replica groups of an unknown form: {text}")


def _iota(shape: tuple[int, ...], transpose: str | None) -> np.ndarray:
    numbers = np.arange(np.prod(shape)).reshape(shape)
    return numbers.transpose(_numbers(transpose)) if transpose else numbers


def _mesh_groups(mesh: str, axes: str) -> Groups:
    """`mesh['a'=2,'b'=4] {'b'}`: a group for each index of the other axes. `'b':(2)2` names a part of an axis."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    if ":" in axes:
        raise ProgramError(f"replica groups over a part of an axis: mesh[{mesh}] {{{axes}}}")
    named = re.findall(r"'([^']+)'", axes)
    order = [*(name for name in sizes if name not in named), *named]
    numbers = np.arange(np.prod(list(sizes.values()), dtype=int)).reshape(list(sizes.values()))
    moved = numbers.transpose([list(sizes).index(name) for name in order])
    return _groups(moved.reshape(-1, int(np.prod([sizes[name] for name in named], dtype=int))))


def _groups(rows: np.ndarray) -> Groups:
    return tuple(tuple(int(d) for d in row) for row in rows)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))
