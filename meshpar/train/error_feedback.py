"""The error feedback of a gradient reduction, which is stored and checkpointed as carried state."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.collectives.reduction import Reduce
from meshpar.parallel.context import ParallelContext
from meshpar.sharding.resolve import Placement, sharding_axes
from meshpar.sharding.spec import ArraySpec
from meshpar.train.state import StatePlacement
from meshpar.train.strategy import Strategy

REDUCE = "reduce"
"""The key of error feedback in `TrainState.carried`."""
SLICES = "slices"
"""The key in `TrainState.carried` of the arrays of slices that train alone, see `train.slices`."""
COPIES = "copies"
"""The dim over devices that hold the same part of a gradient: each has error feedback of its own."""
ONE = "one"
"""The name of every dim of error feedback that has another shape than its gradient."""


@dataclass(frozen=True)
class ErrorFeedback(Strategy):
    """What the reduction of gradients carries: {name: tree like the gradients}, see `Reduce.state`.

    Args:
      reduction: of the gradients.
      ctx: of a slice, where slices train alone.
    """

    reduction: Reduce
    ctx: ParallelContext
    key: ClassVar[str] = REDUCE

    @classmethod
    def of(cls, ctx: ParallelContext) -> Self | None:
        return cls(ctx.gradient_reduction, ctx.in_slice) if ctx.gradient_reduction else None

    def placed(self, placement: StatePlacement) -> Any:
        trees = place_state(placement.trained, self.reduction, lambda p: sum(self.ctx.copy_axes(p.spec.dims), ()))
        return trees if any(map(jax.tree.leaves, trees.values())) else {}

    def initial(self, params: Any, placed: Any) -> Any:
        return zeros(placed)


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
