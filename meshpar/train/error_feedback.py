"""Places the error feedback of a gradient reduction, which is stored and checkpointed as carried state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.collectives.reduction import Reduce
from meshpar.parallel.context import ParallelContext
from meshpar.sharding.resolve import Placement, sharding_axes
from meshpar.sharding.spec import ArraySpec

REDUCE = "reduce"
"""The key of error feedback in `TrainState.carried`."""
SLICES = "slices"
"""The key in `TrainState.carried` of the arrays of slices that train alone, see `train.slices`."""
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
    trees = place_state(sharded, ctx.gradient_reduction, lambda p: sum(ctx.copy_axes(p.spec.dims), ()))
    return {REDUCE: trees} if any(map(jax.tree.leaves, trees.values())) else {}


def place_state(summed: Any, reduction: Reduce, axes_of: Callable[[Placement], tuple[str, ...]]) -> dict[str, Any]:
    """Placements of the state of a reduction: name -> tree of `Placement`.

    Args:
      summed: tree of `Placement`, of the arrays that are summed.
      axes_of: the axes over which an array is summed.
    """
    return {
        name: jax.tree.map(lambda p, name=name: _place(p, name, reduction, axes_of(p)), summed)
        for name in reduction.state(())
    }


def zeros(placements: Any) -> Any:
    """The error feedback before the first step."""
    return jax.tree.map(lambda p: jnp.zeros(p.spec.shape, p.spec.dtype), placements)


def of_loss(carried: Any) -> Any:
    """The carried state of the loss: without error feedback, and without the arrays of slices."""
    if REDUCE not in carried and SLICES not in carried:
        return carried
    kept = {key: value for key, value in carried.items() if key not in (REDUCE, SLICES)}
    return type(carried)(kept)  # an NNX state stays one


def _place(gradient: Placement, name: str, reduction: Reduce, axes: tuple[str, ...]) -> Placement | None:
    """Places the error feedback of one gradient; None if no two devices have the same part of it."""
    if not axes:
        return None
    shape = reduction.state(gradient.local_shape)[name]
    if shape == gradient.local_shape:
        return _stack(gradient, axes, gradient.spec.shape, gradient.spec.dims, gradient.axes)
    axes += tuple(axis for axis in sharding_axes([gradient]) if axis not in axes)
    return _stack(gradient, axes, shape, (ONE,) * len(shape), ((),) * len(shape))


def _stack(gradient: Placement, over: tuple[str, ...], shape: Any, dims: Any, axes: Any) -> Placement:
    """Places an array with a copy for each device along the axes `over`."""
    num = math.prod(gradient.mesh.shape[axis] for axis in over)
    spec = ArraySpec((num, *shape), np.dtype("float32"), (COPIES, *dims))
    return Placement(spec, gradient.mesh, (over, *axes), ("reduce",) * (1 + len(dims)))
