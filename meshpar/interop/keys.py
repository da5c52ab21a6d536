"""Converts random keys in a tree to integers and back: checkpoints and shardings support only plain arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.tree import flatten_with_paths, map_with_path

KEY_DATA = "key_data"
"""The name of the last dim of keys that were converted to integers: the words of a key."""


def as_data(tree: Any) -> Any:
    """The tree with each array of keys replaced by `uint32[..., words]`.

    >>> as_data({"key": jax.random.key(3), "count": 0})["key"].tolist()
    [0, 3]
    """
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)


def as_keys(tree: Any, implementations: Mapping[str, Any]) -> Any:
    """The inverse of `as_data`.

    Args:
      implementations: the result of `key_implementations`.
    """

    def one(path: str, x: Any) -> Any:
        return jax.random.wrap_key_data(x, impl=implementations[path]) if path in implementations else x

    return map_with_path(one, tree)


def key_implementations(tree: Any) -> dict[str, Any]:
    """Path -> random number generator of each array of keys.

    Args:
      tree: of arrays or structs.
    """
    found: dict[str, Any] = {}

    def look(tree: Any) -> None:
        keys = {path: x for path, x in flatten_with_paths(tree).items() if _is_key(x)}
        found.update({path: jax.random.key_impl(x) for path, x in keys.items()})

    jax.eval_shape(look, tree)
    return found


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
