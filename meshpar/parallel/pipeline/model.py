"""A model as a pipeline sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from meshpar.parallel.outputs import Auxiliary
from meshpar.parallel.pipeline.split import Policy

Batch = dict[str, jax.Array]


@dataclass(frozen=True)
class PipelineModel:
    """A model that can be cut between its layers, as functions of its parameters.

    Args:
      layers: the key of the stacked layers in the tree of parameters; their first dim is `layers`.
      num_layers: of the whole model.
      stacked_layers: rows of their parameters; those behind the last layer are padding.
      embed: (params, batch, key) -> x, what the first layer takes.
      shared: (batch, x) -> what all layers take besides, worked out once for all layers of a stage.
      layer: (one layer's params, x, batch, shared, key, index) -> (x, its share of the model's `Auxiliary`).
      loss: (params, x, batch) -> (sum, count), from what the last layer gives.
      count: batch -> the same count, by which auxiliary losses are weighted.
      policy: what a layer's forward keeps for its backward, as of `jax.checkpoint`.
      head: what `loss` costs, in layers.
    """

    layers: str
    num_layers: int
    stacked_layers: int
    embed: Callable[[Any, Batch, jax.Array | None], jax.Array]
    shared: Callable[[Batch, jax.Array], Any]
    layer: Callable[..., tuple[jax.Array, Auxiliary]]
    loss: Callable[[Any, jax.Array, Batch], tuple[jax.Array, jax.Array]]
    count: Callable[[Batch], jax.Array]
    policy: Policy
    head: float = 0.0
