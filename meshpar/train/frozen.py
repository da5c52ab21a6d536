"""Trees without the parameters that are not trained: `optax.MaskedNode`s, which hold nothing, in their places."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
from optax import MaskedNode

from meshpar.tree import map_with_path


def without(tree: Any, frozen: Collection[str]) -> Any:
    """The tree without the leaves of these paths.

    >>> without({"table": 1, "head": 2}, {"table"})
    {'head': 2, 'table': MaskedNode()}
    """
    return map_with_path(lambda path, leaf: MaskedNode() if path in frozen else leaf, tree) if frozen else tree


def as_in(trained: Any, whole: Any) -> Any:
    """The leaves of `whole` that `trained` has too."""
    return jax.tree.map(lambda one, leaf: one if _is_masked(one) else leaf, trained, whole, is_leaf=_is_masked)


def filled(trained: Any, whole: Any) -> Any:
    """`trained`, with the leaves of `whole` in its gaps.

    >>> filled({"head": 5, "table": MaskedNode()}, {"head": 2, "table": 1})
    {'head': 5, 'table': 1}
    """
    return jax.tree.map(lambda one, leaf: leaf if _is_masked(one) else one, trained, whole, is_leaf=_is_masked)


def _is_masked(x: Any) -> bool:
    return isinstance(x, MaskedNode)
