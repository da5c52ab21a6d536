"""How the loss of a user's model uses each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from meshpar.optim.uses import matrices
from meshpar.parallel.context import tracing
from meshpar.sharding.spec import ArraySpec
from meshpar.train.loss import Loss
from meshpar.train.step import with_rows


def kinds_of(loss: Loss, specs: Any, batch: Mapping[str, ArraySpec], key: Any = None, carried: Any = None) -> Any:
    """A tree of `Matrix` like the parameters, from the trace of the loss on one device, see `optim.uses`.

    Args:
      specs, carried: trees of `ArraySpec`.
      key: the struct of the loss's key; None if it draws nothing.
    """

    def struct(spec: ArraySpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype)

    params, batch, carried = jax.tree.map(struct, (specs, dict(batch), carried or {}))
    rows = jax.eval_shape(with_rows, batch)
    with tracing("cpu"):  # without asking JAX, which would start a backend
        traced = jax.make_jaxpr(lambda *arguments: loss(*arguments).loss)(params, rows, key, carried)
    return matrices(traced, params)
