"""The exported function: the forward of a decoder, from parameters by path and tokens to logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.convert import trained
from meshpar.errors import CheckpointError
from meshpar.experiment.config import Run
from meshpar.models.decoder import DecoderModel
from meshpar.nn.attention.core import Window, documents
from meshpar.nn.attention.reference import Reference, causal, dot_product_attention
from meshpar.nn.describe import describe, functional
from meshpar.nn.remat import Remat
from meshpar.parallel.precision import computed_in, wide
from meshpar.tree import map_with_path

Forward = Callable[[Mapping[str, Any], jax.Array], jax.Array]
"""(parameters by path, int32[batch, seq] tokens) -> float32[batch, seq, vocab_size] logits. A row is one document."""


class Portable(Reference):
    """The reference core for rows of any length. It does not count operations, because their number is symbolic."""

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, segments: Any, window: Window
    ) -> tuple[jax.Array, None]:
        return dot_product_attention(q, k, v, causal(documents(segments, q), window)), None


def open_model(source: Path) -> tuple[Run, DecoderModel, dict[str, jax.Array]]:
    """A run, its decoder, and the parameters of its last checkpoint by path.

    Raises:
      CheckpointError: there is no checkpoint, or its model is not one of meshpar's decoders.
    """
    run, params, saved = trained(source)
    if not (model := run.model.generation()):
        what = "only meshpar's own decoders are exported"
        fix = "pass a function of your own, of the parameters that meshpar.Checkpoints reads, to jax.export"
        raise CheckpointError(f"{saved.folder}: model.kind = {run.model.kind}: {what}; {fix}")
    return run, model, params


def forward_of(model: DecoderModel, compute: str) -> Forward:
    """The forward in the dtype `compute`, which every platform computes on one device.

    The reference core replaces attention kernels that only some platforms have; it holds all scores in memory. Experts
    compute every choice of every token, also where `dispatch: capacity` dropped choices in training.
    """
    portable: dict[str, Any] = {"attention": Portable(), "remat": Remat(policy="none"), "unroll": 1, "dropout": 0.0}
    if model.experts:
        portable["experts"] = model.experts.without_training()
    portable_model = model.model_copy(update=portable)
    abstract = portable_model.abstract()
    specs = describe(abstract)
    apply = functional(abstract)

    def forward(params: Mapping[str, Any], tokens: jax.Array) -> jax.Array:
        nested = map_with_path(lambda path, _: computed_in(jnp.asarray(params[path]), compute), specs)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        batch = {"tokens": tokens, "positions": positions, "segments": jnp.zeros_like(tokens), "rows": rows}
        return wide(apply(nested, batch)[..., : model.vocab_size])

    return forward
