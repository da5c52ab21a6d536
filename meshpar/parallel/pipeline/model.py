"""The interface of a model to a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from meshpar.parallel.batch import Batch
from meshpar.parallel.outputs import Auxiliary
from meshpar.parallel.pipeline.split import Policy


@dataclass(frozen=True)
class PipelineModel:
    """The functions of a model that can be cut between its layers.

    Args:
      layers: the key of the stacked layers in the tree of parameters; their first dim is `layers`.
      num_layers: the number of layers of the whole model.
      stacked_layers: the size of dim `layers`; rows beyond `num_layers` are padding.
      embed: (params, batch, key) -> x, the input of the first layer.
      shared: (batch, x) -> further inputs of all layers, computed once for all layers of a stage.
      layer: (one layer's params, x, batch, shared, key, index) -> (x, its share of the model's `Auxiliary`).
      loss: (params, x, batch) -> (sum, count), where x is the output of the last layer.
      evaluation: like `loss`, for evaluations.
      count: batch -> the count of `loss`, which weights auxiliary losses.
      policy: which values a layer's forward saves for its backward, as in `jax.checkpoint`.
      unroll: layers per iteration of a stage's loops over its layers.
      head: the cost of `loss`, in layers.
    """

    layers: str
    num_layers: int
    stacked_layers: int
    embed: Callable[[Any, Batch, jax.Array | None], jax.Array]
    shared: Callable[[Batch, jax.Array], Any]
    layer: Callable[..., tuple[jax.Array, Auxiliary]]
    loss: Callable[[Any, jax.Array, Batch], tuple[jax.Array, jax.Array]]
    evaluation: Callable[[Any, jax.Array, Batch], tuple[jax.Array, jax.Array]]
    count: Callable[[Batch], jax.Array]
    policy: Policy
    unroll: int
    head: float = 0.0
