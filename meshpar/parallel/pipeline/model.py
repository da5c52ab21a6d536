"""The interface of a model to a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax

from meshpar.parallel.batch import Batch
from meshpar.parallel.outputs import Scalars, Shares
from meshpar.parallel.pipeline.split import Policy

Totals = tuple[jax.Array, jax.Array, Scalars]
"""Sums of losses, tokens and metrics, as in `LossSums`."""


CARRIED = "(carried) "
"""The start of the names, among the arrays of a microbatch, of the carried state that it gets."""


@dataclass(frozen=True)
class LayerCounts:
    """The layers of a stack.

    Args:
      num_layers: their number.
      stacked: the size of dim `layers`; rows beyond `num_layers` are padding.
      head: the cost of what follows the last stack, in layers of this one.
      is_stacked: whether their parameters are stored as stacks; else each stage stores those of all layers.
      then: the stacks that follow.
      costs: of a layer of each of these, in layers of this stack.
    """

    num_layers: int
    stacked: int
    head: float
    is_stacked: bool = True
    then: tuple[LayerCounts, ...] = ()
    costs: tuple[float, ...] = ()

    @property
    def stacks(self) -> tuple[LayerCounts, ...]:
        return (self, *self.then)


@runtime_checkable
class Stages(Protocol):
    """A model that can be cut between its layers. Fields not described here are those of `PipelineModel`."""

    def layer_counts(self) -> LayerCounts:
        """What decides how many layers each stage gets, of all stacks."""
        ...

    def states(self, carried: Any, key: jax.Array | None, num_microbatches: int) -> tuple[Batch, Any]:
        """Arrays of the carried state that each microbatch gets, [num_microbatches, ...], and the next step's state."""
        ...

    def divided(self, params: Any) -> dict[str, Any]:
        """A tree of parameters as a dict with the stacked layers under one key."""
        ...

    def joined(self, divided: dict[str, Any]) -> Any:
        """The tree of parameters again."""
        ...

    def on_shards(self, params: dict[str, Any], batch: Batch, key: jax.Array | None) -> PipelineModel:
        """The functions of the local shards of these parameters and of one microbatch, in the manual lowering."""
        ...


@dataclass(frozen=True, kw_only=True)
class LayerStack:
    """The functions of equal layers. What passes between layers is a tree of arrays.

    Args:
      layers: the key of the stacked layers in the tree of parameters; their first dim is `layers`.
      num_layers: the number of layers of the whole stack.
      stacked_layers: the size of dim `layers`; rows beyond `num_layers` are padding.
      shared: (batch, x) -> further inputs of all layers, computed once for all layers of a stage.
      layer: (one layer's params, x, batch, shared, key, index) -> (x, its `Shares`).
      policy: which values a layer's forward saves for its backward, as in `jax.checkpoint`.
      unroll: layers per iteration of a stage's loops over its layers.
      recomputes: whether layers have checkpoints of the user's own, whose values a backward computes again.
      enter: (params, x, batch) -> x, what stands between the stack before it and this one; None for the first stack.
    """

    layers: str
    num_layers: int
    stacked_layers: int
    shared: Callable[[Batch, Any], Any]
    layer: Callable[..., tuple[Any, Shares]]
    policy: Policy
    unroll: int
    recomputes: bool = False
    enter: Callable[[Any, Any, Batch], Any] | None = None


@dataclass(frozen=True, kw_only=True)
class PipelineModel(LayerStack):
    """The functions of a model that can be cut between its layers.

    Args:
      embed: (params, batch, key) -> x, the input of the first layer.
      loss: (params, x, batch) -> (sum, count, metrics), as in `LossSums`, where x is the output of the last layer.
      then: the stacks that follow the first one, as a decoder follows an encoder. Only layers of a single stack add to
        the loss.
    """

    embed: Callable[[Any, Batch, jax.Array | None], Any]
    loss: Callable[[Any, Any, Batch], Totals]
    then: tuple[LayerStack, ...] = ()

    @property
    def stacks(self) -> tuple[LayerStack, ...]:
        return (self, *self.then)
