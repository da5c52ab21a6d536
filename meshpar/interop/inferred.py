"""Names for the dims of a user's model that names none, from the uses of its parameters in its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from meshpar.interop.losses import with_loss_sums
from meshpar.interop.module import functions, is_module
from meshpar.interop.specs import specs_of
from meshpar.parallel.context import tracing
from meshpar.partition.inferred import Dims, inferred_dims
from meshpar.sharding.rules import UNNAMED
from meshpar.sharding.spec import ArraySpec
from meshpar.train.loss import Loss
from meshpar.train.step import with_rows
from meshpar.tree import map_with_path

INFER = "infer"
"""The value of `dims` with which the dims of parameters without names are inferred."""
OF_SHARDS = "a loss for local shards says nothing of the dims of whole arrays"


def infer_dims(params: Any, loss: Callable[..., Any], batch: Mapping[str, Any], key: jax.Array | None = None) -> Dims:
    """Infers a name for each dim of the parameters, to pass as `dims` of `training`, or `model.dims` of a config.

    `training(..., dims="infer")` uses the same names.

    Args:
      params: a tree of arrays or structs, without Flax's boxes; or a Flax module, as `training` takes it.
      loss: (params, batch, key) -> a mean, as `training` takes it, without carried state. Of a module: (model, batch)
        or (model, batch, key).
      batch: an example batch: name -> array or struct.
      key: what the loss draws from; None if it draws nothing. A module needs none.

    Returns:
      Path -> `mlp` for dims that tensor parallelism shards, in pairs of a product that grows a dim and one that shrinks
      it; `embed` for those of the residual stream; `layers` for the dim of a stack that a loop scans; else `unnamed`.

    Raises:
      ConfigError: no product grows a dim that another one shrinks.

    Examples:
      >>> import jax.numpy as jnp
      >>> params = {"up": jnp.ones((8, 32)), "bias": jnp.ones(32), "down": jnp.ones((32, 8))}
      >>> def loss(params, batch, key):
      ...     hidden = jnp.tanh(batch["x"] @ params["up"] + params["bias"])
      ...     return jnp.square(hidden @ params["down"] - batch["x"]).mean()
      >>> infer_dims(params, loss, {"x": jnp.ones((4, 8))})
      {'bias': ('mlp',), 'down': ('mlp', 'unnamed'), 'up': ('unnamed', 'mlp')}
    """
    if not is_module(params):
        return inferred_dims(params, loss, batch, key)
    module = functions(params, loss, None, batch)
    specs, carried, keys = specs_of(module.init, module.carried, 0, {})
    arrays = {name: ArraySpec(np.shape(x), np.dtype(x.dtype), ("",) * np.ndim(x)) for name, x in batch.items()}
    sums = with_loss_sums(module.loss, (specs, arrays, carried), module.carried is not None, keys)
    return _inferred(sums, specs, arrays, jax.random.key(0) if module.draws else None, carried)


def with_inferred(loss: Loss, specs: Any, batch: Mapping[str, ArraySpec], key: Any = None, carried: Any = None) -> Any:
    """The specs of the parameters, with inferred names for the dims of those that have none.

    Args: see `kinds.kinds_of`.
    """
    found = _inferred(loss, specs, batch, key, carried)

    def named(path: str, spec: ArraySpec) -> ArraySpec:
        is_named = any(dim != UNNAMED for dim in spec.dims)
        return spec if is_named else replace(spec, dims=found[path.removesuffix(".value")])

    return map_with_path(named, specs)


def _inferred(loss: Loss, specs: Any, batch: Mapping[str, ArraySpec], key: Any, carried: Any) -> Dims:
    params, arrays, state = jax.tree.map(lambda spec: spec.struct, (specs, dict(batch), carried or {}))

    def mean(params: Any, batch: Any, key: Any, carried: Any) -> jax.Array:
        return loss(params, batch, key, carried).loss

    with tracing(None):
        return inferred_dims(params, mean, jax.eval_shape(with_rows, arrays), key, state)
