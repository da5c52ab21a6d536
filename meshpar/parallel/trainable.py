"""Trees of trained parameters: `optax.MaskedNode`, which has no leaves, replaces each frozen parameter."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import optax

from meshpar.tree import map_with_path


def without(tree: Any, frozen: Collection[str]) -> Any:
    """The tree without the leaves at these paths.

    >>> without({"table": 1, "head": 2}, {"table"})
    {'head': 2, 'table': MaskedNode()}
    """
    return map_with_path(lambda path, leaf: optax.MaskedNode() if path in frozen else leaf, tree) if frozen else tree


def as_in(trained: Any, whole: Any) -> Any:
    """`whole`, with each leaf masked that `trained` masks."""
    return jax.tree.map(lambda x, leaf: x if is_masked(x) else leaf, trained, whole, is_leaf=is_masked)


def frozen_in(trained: Any, whole: Any) -> Any:
    """`whole`, with each leaf masked that `trained` has.

    >>> frozen_in({"head": 5, "table": optax.MaskedNode()}, {"head": 2, "table": 1})
    {'head': MaskedNode(), 'table': 1}
    """

    def one(x: Any, leaf: Any) -> Any:
        return leaf if is_masked(x) else optax.MaskedNode()

    return jax.tree.map(one, trained, whole, is_leaf=is_masked)


def filled(trained: Any, whole: Any) -> Any:
    """`trained`, with each masked leaf filled from `whole`.

    >>> filled({"head": 5, "table": optax.MaskedNode()}, {"head": 2, "table": 1})
    {'head': 5, 'table': 1}
    """
    return jax.tree.map(lambda x, leaf: leaf if is_masked(x) else x, trained, whole, is_leaf=is_masked)


def is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)
