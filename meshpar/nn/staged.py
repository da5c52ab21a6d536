"""Divides a transformer into the parts that a pipeline runs on its stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from meshpar.nn.describe import functional
from meshpar.nn.transformer import Transformer
from meshpar.parallel.batch import Batch
from meshpar.parallel.data import gathering_again
from meshpar.parallel.pipeline.model import PipelineModel, Totals
from meshpar.parallel.projection import Projection

Sums = Callable[[Projection, Batch], tuple[jax.Array, jax.Array]]


def parts(model: Transformer, loss: Sums, evaluation: Sums, count: Callable[[Batch], jax.Array]) -> PipelineModel:
    """Returns the embedding, the layers and the loss of a model as functions of parameters.

    Args:
      model: abstract, from `nnx.eval_shape`.
      loss: (projection of the logits, batch) -> (sum, count).
      evaluation: the same, for evaluations.
      count: batch -> the count alone.
    """
    project = functional(model, "project")
    sizes = model.model

    # `auto` keeps the loop: a step without it takes about 1.2 times as long on CPUs, see docs/design/0005.
    unroll = {"auto": 1, "all": sizes.num_layers}

    def at_end(sums: Sums) -> Callable[[Any, jax.Array, Batch], Totals]:
        return lambda params, x, batch: (*sums(project(params, x), batch), {})

    return PipelineModel(
        layers="blocks",
        num_layers=sizes.num_layers,
        stacked_layers=sizes.stacked_layers,
        embed=functional(model, "embed"),
        shared=model.shared,
        layer=model.layer,
        loss=at_end(loss),
        evaluation=at_end(evaluation),
        count=count,
        policy=gathering_again(sizes.remat.checkpoint_policy()),
        unroll=sizes.unroll if isinstance(sizes.unroll, int) else unroll[sizes.unroll],
        head=sizes.hidden_size * sizes.padded_vocab / sizes.weights_of_a_layer,
    )
