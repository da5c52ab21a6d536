"""Places the error feedback of a gradient reduction, which is stored and checkpointed as carried state."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.parallel.context import ParallelContext
from meshpar.sharding.resolve import Placement, sharding_axes
from meshpar.sharding.spec import ArraySpec

REDUCE = "reduce"
"""The key of error feedback in `TrainState.carried`."""
COPIES = "copies"
"""The dim over devices that hold the same part of a gradient: each has error feedback of its own."""
ONE = "one"
"""The name of every dim of error feedback that has another shape than its gradient."""


def place_error_feedback(sharded: Any, ctx: ParallelContext) -> dict[str, Any]:
    """Placements of the reduction's carried state: {reduce: {name: tree of `Placement`}}, or {} without any.

    Args:
      sharded: tree of `Placement`, of the gradients.
    """
    if ctx.gradient_reduction is None:
        return {}
    names = ctx.gradient_reduction.state(())
    trees = {name: jax.tree.map(lambda p, name=name: _place(p, name, ctx), sharded) for name in names}
    return {REDUCE: trees} if any(map(jax.tree.leaves, trees.values())) else {}


def zeros(placements: Any) -> Any:
    """The error feedback before the first step."""
    return jax.tree.map(lambda p: jnp.zeros(p.spec.shape, p.spec.dtype), placements)


def of_loss(carried: Any) -> Any:
    """The carried state without error feedback: that of the loss."""
    return {key: value for key, value in carried.items() if key != REDUCE} if REDUCE in carried else carried


def _place(gradient: Placement, name: str, ctx: ParallelContext) -> Placement | None:
    """Places the error feedback of one gradient; None if no two devices have the same part of it."""
    inside, across = ctx.copy_axes(gradient.spec.dims)
    axes = inside + across
    if not axes or ctx.gradient_reduction is None:
        return None
    shape = ctx.gradient_reduction.state(gradient.local_shape)[name]
    if shape == gradient.local_shape:
        return _stack(gradient, axes, gradient.spec.shape, gradient.spec.dims, gradient.axes)
    axes += tuple(axis for axis in sharding_axes([gradient]) if axis not in axes)
    return _stack(gradient, axes, shape, (ONE,) * len(shape), ((),) * len(shape))


def _stack(gradient: Placement, over: tuple[str, ...], shape: Any, dims: Any, axes: Any) -> Placement:
    """Places an array with a copy for each device along the axes `over`."""
    num = math.prod(gradient.mesh.shape[axis] for axis in over)
    spec = ArraySpec((num, *shape), np.dtype("float32"), (COPIES, *dims))
    return Placement(spec, gradient.mesh, (over, *axes), ("reduce",) * (1 + len(dims)))
