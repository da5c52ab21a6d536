"""Reads the shape, dtype and dims of every parameter that a Flax model declares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict

from meshpar.errors import Problems, ShardingError
from meshpar.parallel.precision import is_mixed
from meshpar.sharding.spec import ArraySpec


def describe(model: nnx.Module) -> dict[str, Any]:
    """Returns the `ArraySpec` of each parameter, as nested dicts by attribute name.

    Args:
      model: holds arrays, or structs from `nnx.eval_shape`.

    Raises:
      ShardingError: lists every parameter whose names do not match its dims.
    """
    problems = Problems()
    flat = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    for path, param in flat.items():
        names = param.get_metadata().get("dims")
        if len(names or ()) != param.ndim:
            problems.add(".".join(map(str, path)), f"{param.ndim} dims {param.shape}, names {names}")
    problems.raise_any(ShardingError, "every dim of a parameter needs a name (nnx.Param(value, dims=(...))):")
    specs = {path: ArraySpec(p.shape, np.dtype(p.dtype), p.get_metadata()["dims"]) for path, p in flat.items()}
    return nested(specs)


def functional(model: nnx.Module, method: str = "__call__") -> Callable[..., Any]:
    """Turns a model into a function `apply(params, *args)`, with `params` nested as in `describe`.

    Args:
      method: the method of the model that `apply` calls.
    """
    graph, state = nnx.split(model)

    def apply(params: Any, *args: Any) -> Any:
        pure = nnx.to_pure_dict(state)
        leaves, structure = jax.tree.flatten(params, is_leaf=is_mixed)
        assert jax.tree.structure(pure) == structure, "the parameters belong to another model"
        filled = jax.tree.unflatten(jax.tree.structure(state), leaves)
        return getattr(nnx.merge(graph, filled), method)(*args)

    return apply


def nested(flat: dict[tuple[Any, ...], Any]) -> dict[str, Any]:
    """Turns a dict of leaves by path into nested dicts."""
    return unflatten_dict({tuple(map(str, path)): leaf for path, leaf in flat.items()})
