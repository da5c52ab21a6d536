"""What a strategy changes in the step of a training: the state that steps carry, and how gradients are computed.

A strategy is a subclass in a file of its own. `Training.strategies` lists those of a training, and the training reads
nothing else of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, ClassVar, Self

from meshpar.parallel.context import ParallelContext
from meshpar.sharding.spec import ArraySpec
from meshpar.train.state import StatePlacement


class Strategy:
    """A part of a training step. By default it changes nothing."""

    key: ClassVar[str] = ""
    """The name in `TrainState.carried` of what it carries from step to step; empty if it carries nothing."""
    is_of_loss: ClassVar[bool] = False
    """Whether the loss reads what it carries."""

    @classmethod
    def of(cls, ctx: ParallelContext) -> Self | None:
        """The strategy that the `parallel` section of a context declares; None if it declares none of this kind."""
        return None

    def placed(self, placement: StatePlacement) -> Any:
        """Tree of `Placement`, of what it carries.

        Args:
          placement: of the parameters.
        """
        return {}

    def initial(self, params: Any, placed: Any) -> Any:
        """What it carries before the first step.

        Args:
          params: the first parameters.
          placed: what `placed` returned.
        """
        return {}

    def gradients(self, gradients: Callable[..., Any]) -> Callable[..., Any]:
        """(params, batch, step, carried) -> `Gradients` of the step, from that of the loss."""
        return gradients

    def is_countable(self, ctx: ParallelContext) -> bool:
        """Whether a traced step of the manual lowering contains everything that a device sends for it."""
        return True

    @property
    def given(self) -> dict[str, Any]:
        """Further inputs of every step: name -> tree of structs."""
        return {}

    @property
    def arrays(self) -> dict[str, ArraySpec]:
        """The arrays that it adds to the batch of a step's loss."""
        return {}


def of_loss(carried: Any, unseen: Collection[str]) -> Any:
    """The carried state of the loss.

    Args:
      unseen: the keys of the state that only the step reads.
    """
    if not {*unseen} & {*carried}:
        return carried
    return type(carried)({key: value for key, value in carried.items() if key not in unseen})  # an NNX state stays one
