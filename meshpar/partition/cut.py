"""A traced loss that is cut at its stacks of layers, see `cutter`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr

from meshpar.partition.stack import Own, arguments_of


@dataclass(frozen=True)
class Cut:
    """A loss in three parts, each of them a program of whole arrays.

    Args:
      num_layers: the number of layers.
      own: the layers' parameters.
      data: the arguments of the loss that are no parameters.
      outer: the arguments without those of `own`.
      first: (*outer) -> the message that the first layer gets; of a later stack (*outer, *message of the one before).
      shared: (*data) -> values that every layer reads, then `num_rows` arrays of which it reads its row.
      layer: (*shared, *message, *its own) -> (*message, *what it adds to the results `adds`).
      last: (*outer, *message) -> results of the loss, without the carried state.
      state: (*key, *carried state) -> the next carried state.
      unroll: layers per iteration of a loop over them.
      adds: the places of the results of the loss that a layer adds to.
      then: the cut of `last` at the next stack.
    """

    num_layers: int
    own: tuple[Own, ...]
    data: tuple[int, ...]
    outer: tuple[int, ...]
    first: ClosedJaxpr
    shared: ClosedJaxpr
    num_rows: int
    layer: ClosedJaxpr
    last: ClosedJaxpr
    state: ClosedJaxpr
    unroll: int = 1
    adds: tuple[int, ...] = ()
    then: Cut | None = None

    @property
    def stacks(self) -> tuple[Cut, ...]:
        """This cut and those that follow."""
        return (self, *(self.then.stacks if self.then else ()))

    @property
    def end(self) -> ClosedJaxpr:
        """What stands after all stacks."""
        return self.stacks[-1].last

    @property
    def message(self) -> list[Any]:
        """The types of what a layer passes on. What it adds to the results follows them, and is not sent."""
        return self.layer.out_avals[: len(self.layer.out_avals) - len(self.adds)]

    @property
    def is_stacked(self) -> bool:
        """Whether the layers' parameters are stacked, and not arguments for each layer."""
        return all(isinstance(one, int) for one in self.own)

    @property
    def of_layers(self) -> tuple[int, ...]:
        """The arguments that are parameters of layers."""
        return arguments_of(self.own)


@dataclass(frozen=True)
class Argument:
    """An argument of a loss: the path of a parameter, or the name of another array, and its shape and dims."""

    name: str
    aval: Any
    dims: tuple[str, ...] = ()


OF_ALL_LAYERS = (
    "a pipeline cannot cut the model here: only the stage that stores a layer has its parameters, and this reads those "
    "of all layers; leave it out, or let the optimizer do it, as weight decay does"
)
