"""Fragments of a state: groups of layers that slices average at different times.

Source: Douillard et al. 2025, arXiv:2501.18512 (the strided pattern of streaming DiLoCo).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import optax

from meshpar.errors import ConfigError
from meshpar.sharding.resolve import Placement
from meshpar.train.stored_layers import LAYERS
from meshpar.tree import flatten_with_paths, map_with_path

NUMBER = re.compile(r"(.*?)_?(\d+)")
"""A module in a path that is one of several layers, as in `block_3.up` or `layers.3.up`."""


def check_fragments(num: int, placements: Any) -> None:
    """Raises ConfigError if a fragment would have no parameter: its rounds would send nothing."""
    dims = [(placement.spec.dims, placement.spec.shape) for placement in jax.tree.leaves(placements)]
    stacked = max((shape[names.index(LAYERS)] for names, shape in dims if LAYERS in names), default=0)
    found = {n % num for n in layer_numbers(placements).values()} | {*range(min(stacked, num))}
    if not found.issuperset(range(num - 1)):
        raise ConfigError(
            f"parallel.local.fragments: {num} fragments take turns with the layers, and the model has {len(found)}: a"
            f" stack whose dim is called {LAYERS!r}, or modules with numbers in their paths, as block_3; "
            f"parallel.local.fragments={len(found) + 1}"
        )


def layer_numbers(placements: Any) -> dict[str, int]:
    """Path of a parameter -> the number of its layer, of layers that are modules of their own.

    Its number is the outermost in its path with which another parameter is of the same kind.
    """
    paths = [path for path, one in flatten_with_paths(placements).items() if LAYERS not in one.spec.dims]
    found: dict[str, list[tuple[Any, int]]] = {path: [*_numbers(path)] for path in paths}
    members = Counter(kind for each in found.values() for kind, _ in each)
    first = {path: next((n for kind, n in each if members[kind] > 1), None) for path, each in found.items()}
    return {path: number for path, number in first.items() if number is not None}


def _numbers(path: str) -> Iterator[tuple[Any, int]]:
    """The kind of a parameter, which is its path without a number, and this number; the outermost first."""
    parts = path.split(".")
    for at, part in enumerate(parts):
        if match := NUMBER.fullmatch(part):
            yield (*parts[:at], match[1], None, *parts[at + 1 :]), int(match[2])


@dataclass(frozen=True)
class Fragment:
    """Every `num`-th layer, from `index` on. The last fragment also has all arrays without layers.

    Args:
      index: from 0.
      numbers: see `layer_numbers`.
    """

    index: int
    num: int
    numbers: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_last(self) -> bool:
        return self.index == self.num - 1

    def placements(self, tree: Any) -> Any:
        """The placements of the arrays of which the fragment has a part; `optax.MaskedNode` for the others."""
        return map_with_path(lambda path, p: p if self._has(path, p) else optax.MaskedNode(), tree)

    def of(self, arrays: Any, placements: Any) -> Any:
        """The fragment's parts of the arrays; `optax.MaskedNode` if it has none. Every fragment has all scalars."""

        def part(path: str, p: Placement, x: jax.Array) -> Any:
            if not self._has(path, p):
                return optax.MaskedNode()
            return x[self._index(p)]

        return map_with_path(part, placements, arrays)

    def into(self, parts: Any, arrays: Any, placements: Any) -> Any:
        """Writes the fragment's parts into the arrays. Scalars count rounds, so only the last fragment changes them."""

        def whole(path: str, p: Placement, x: jax.Array, part: Any) -> jax.Array:
            if not self._has(path, p) or (not p.spec.dims and not self.is_last):
                return x
            return x.at[self._index(p)].set(part) if self.num > 1 else part

        return map_with_path(whole, placements, arrays, parts)

    def _has(self, path: str, placement: Placement) -> bool:
        dims = placement.spec.dims
        if LAYERS in dims or not dims:
            return True
        number = self._number(path)
        return self.is_last if number is None else number % self.num == self.index

    def _number(self, path: str) -> int | None:
        """The number of the layer of a parameter, or of an optimizer's array, whose path ends with the parameter's."""
        parts = path.split(".") if self.numbers else []
        ends = (".".join(parts[at:]) for at in range(len(parts)))
        return next((self.numbers[end] for end in ends if end in self.numbers), None)

    def _index(self, placement: Placement) -> tuple[slice, ...]:
        dims = placement.spec.dims
        if self.num == 1 or LAYERS not in dims:
            return (slice(None),) * len(dims)
        at = dims.index(LAYERS)
        return (slice(None),) * at + (slice(self.index, None, self.num),)
