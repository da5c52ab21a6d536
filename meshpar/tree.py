"""Trees with paths (first cut)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def _name(path: Any) -> str:
    return ".".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def flatten_with_paths(tree: Any) -> dict[str, Any]:
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def map_with_path(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: fn(_name(path), *leaves), tree, *rest)
