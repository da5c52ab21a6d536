"""Reads what a Flax model declares: the shape, dtype and dims of every parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from meshpar.errors import Problems, ShardingError
from meshpar.sharding.spec import ArraySpec


def describe(model: nnx.Module) -> dict[str, Any]:
    """The specs of a model, as nested dicts by attribute name.

    Args:
      model: real, or abstract from `nnx.eval_shape`.

    Raises:
      ShardingError: lists every parameter without a name for each dim.
    """
    problems = Problems()
    flat = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    for path, param in flat.items():
        if len(param.get_metadata().get("dims", ())) != param.ndim:
            problems.add(
                ".".join(map(str, path)), f"{param.ndim} dims {param.shape}, names {param.get_metadata().get('dims')}"
            )
    problems.raise_any(ShardingError, "every dim of a parameter needs a name (nnx.Param(value, dims=(...))):")
    specs = {path: ArraySpec(p.shape, np.dtype(p.dtype), p.get_metadata()["dims"]) for path, p in flat.items()}
    return nested(specs)


def functional(model: nnx.Module, method: str = "__call__") -> Callable[..., Any]:
    """`apply(params, *args) = model(*args)` with its parameters replaced; `params` nested as in `describe`.

    Args:
      method: what is called of it.
    """
    graph, state = nnx.split(model)

    def apply(params: Any, *args: Any) -> Any:
        pure = nnx.to_pure_dict(state)
        filled = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(_like(pure, params)))
        return getattr(nnx.merge(graph, filled), method)(*args)

    return apply


def nested(flat: dict[tuple[Any, ...], Any]) -> dict[str, Any]:
    """Paths to nested dicts."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, name = map(str, path)
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def _like(pure: Any, params: Any) -> Any:
    assert jax.tree.structure(pure) == jax.tree.structure(params), "these are another model's parameters"
    return params
