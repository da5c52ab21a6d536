"""Fragments of a state: groups of layers that slices average at different times.

Source: Douillard et al. 2025, arXiv:2501.18512 (the strided pattern of streaming DiLoCo).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import optax

from meshpar.errors import ConfigError
from meshpar.sharding.resolve import Placement
from meshpar.train.layer_order import LAYERS


def check_fragments(num: int, placements: Any) -> None:
    """Raises ConfigError if a fragment would have no parameter: its rounds would send nothing."""
    dims = [(placement.spec.dims, placement.spec.shape) for placement in jax.tree.leaves(placements)]
    most = max((shape[names.index(LAYERS)] for names, shape in dims if LAYERS in names), default=0)
    if most < num - 1:
        raise ConfigError(
            f"parallel.local.fragments: {num} fragments take turns with the layers of a stack, and the model has {most}"
            f" stacked layers; name the first dim of a scan's parameters {LAYERS!r}, or parallel.local.fragments="
            f"{most + 1}"
        )


@dataclass(frozen=True)
class Fragment:
    """Every `num`-th layer, from `index` on. The last fragment also has all arrays without layers.

    Args:
      index: from 0.
    """

    index: int
    num: int

    @property
    def is_last(self) -> bool:
        return self.index == self.num - 1

    def placements(self, tree: Any) -> Any:
        """The placements of the arrays of which the fragment has a part; `optax.MaskedNode` for the others."""
        return jax.tree.map(lambda p: p if self._has(p) else optax.MaskedNode(), tree)

    def of(self, arrays: Any, placements: Any) -> Any:
        """The fragment's parts of the arrays; `optax.MaskedNode` if it has none. Every fragment has all scalars."""

        def part(p: Placement, x: jax.Array) -> Any:
            if not self._has(p):
                return optax.MaskedNode()
            return x[self._index(p)]

        return jax.tree.map(part, placements, arrays)

    def into(self, parts: Any, arrays: Any, placements: Any) -> Any:
        """Writes the fragment's parts into the arrays. Scalars count rounds, so only the last fragment changes them."""

        def whole(p: Placement, x: jax.Array, part: Any) -> jax.Array:
            if not self._has(p) or (not p.spec.dims and not self.is_last):
                return x
            return x.at[self._index(p)].set(part) if self.num > 1 else part

        return jax.tree.map(whole, placements, arrays, parts)

    def _has(self, placement: Placement) -> bool:
        dims = placement.spec.dims
        return self.is_last or LAYERS in dims or not dims

    def _index(self, placement: Placement) -> tuple[slice, ...]:
        dims = placement.spec.dims
        if self.num == 1 or LAYERS not in dims:
            return (slice(None),) * len(dims)
        at = dims.index(LAYERS)
        return (slice(None),) * at + (slice(self.index, None, self.num),)
