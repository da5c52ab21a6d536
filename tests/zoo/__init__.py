"""Public models at tiny size, in the style of their authors. None of them knows of meshpar, or of a mesh.

`MODELS[name]()` builds one. Floats are float64 where JAX has them (`jax.enable_x64`), so build a model in that context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import jax
import numpy as np

Init = Callable[[jax.Array], Any]


@dataclass(frozen=True)
class Zoo:
    """A model as `meshpar.training` takes it.

    Args:
      init: key -> the parameters.
      loss: (params, batch, key[, carried]) -> the mean; (mean, metrics); or (mean, metrics, carried).
      batch: name -> array, rows first.
      carried: key -> the state that the forward changes; None if there is none.
      draws: whether the loss draws random numbers from its key.
      dims: path glob -> a name for each dim of the parameters, where the model does not declare names itself.
      axes: the model's own name of a mesh axis -> meshpar's, for a model that names mesh axes instead of dims.
      rules: axes of the dims that have names of the model's own. Standard names follow the presets of a layout.
    """

    name: str
    init: Init
    loss: Callable[..., Any]
    batch: Mapping[str, np.ndarray]
    carried: Init | None = None
    draws: bool = False
    dims: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    axes: Mapping[str, str] = field(default_factory=dict)


NAMES = (
    "lm1b_linen",
    "lm1b_nnx",
    "stacked_nnx",
    "resnet",
    "vae",
    "seq2seq",
    "ppo",
    "vit",
    "mixer",
    "clip",
    "whisper",
    "unet",
    "mamba",
    "bert",
    "dlrm",
    "gshard",
    "ragged_mixture",
    "llama",
    "dit",
    "plain_mlp",
    "vqvae",
    "cnn_nnx",
    "fnet",
    "swav",
    "gpt2",
    "t5",
    "convnext",
    "gemma",
)
EXPLICIT = ("explicit_gemma", "explicit_llada", "explicit_llama")
"""Models for JAX's explicit mode. They say which axes shard their parameters and activations."""


def _build(name: str) -> Zoo:
    return import_module(f"tests.zoo.{name}").build()


MODELS: dict[str, Callable[[], Zoo]] = {name: partial(_build, name) for name in NAMES}
