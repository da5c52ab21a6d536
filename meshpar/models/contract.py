"""The model contract: the methods of a model that training, verification, generation and conversion call.

A kind of model is a config, such as `Llama` or `Import`. It inherits from `ModelContract` and overrides the methods
that it supports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import jax
import numpy as np

from meshpar.config import Config
from meshpar.data.packing import ARRAYS
from meshpar.errors import Problems
from meshpar.models.foreign import Architecture
from meshpar.models.reference import Scale
from meshpar.nn.lora import LoRA
from meshpar.parallel.context import ParallelContext
from meshpar.parallel.outputs import Outputs
from meshpar.sharding.resolve import AnyMesh
from meshpar.sharding.rules import AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.train.loss import Distill, Loss, LossConfig
from meshpar.train.preferences import OfAnswers
from meshpar.train.step import StateParams
from meshpar.train.strategy import Strategy
from meshpar.train.tasks import NamedLoss


class LayerStack(NamedTuple):
    """The number of layers in each stack of a model; each stack is padded to a multiple of `multiple`.

    Args:
      can_pad: whether `model.pad_layers_to_multiple` sets the multiple.
    """

    counts: tuple[int, ...]
    multiple: int
    can_pad: bool = False

    @property
    def num_layers(self) -> int:
        return sum(self.counts)

    @property
    def stacked(self) -> tuple[int, ...]:
        """Rows of the stacked parameters of each stack, including padding."""
        return tuple(-(-count // self.multiple) * self.multiple for count in self.counts)

    @property
    def stacked_layers(self) -> int:
        return sum(self.stacked)

    def lacking(self, num_stages: int) -> int:
        """How many layers the stacks lack to be stored on this number of stages equally."""
        return sum(-rows % num_stages for rows in self.stacked)


@dataclass(frozen=True, kw_only=True)
class Task:
    """The settings of a run that its model depends on.

    Args:
      loss: the loss that is minimized, if `named` is None.
      rules: the run's sharding rules.
      seq_len: tokens per row.
      vocab_size: number of token ids of the data.
      seed: the run's seed.
      has_documents: whether a row may contain several documents, between which there is no attention.
      adapter: LoRA matrices that are trained instead of the model, which is frozen.
      distill: a teacher model, for distillation.
      mesh: the mesh of the program that is made; None where none is.
      arrays: the arrays of a batch, of data that are rows of arrays; None for packed tokens.
      named: the loss of rows of arrays that the config names.
      answers: the loss of whole answers.
    """

    loss: LossConfig
    rules: AxisRules
    seq_len: int
    vocab_size: int
    seed: int
    has_documents: bool = True
    adapter: LoRA | None = None
    distill: Distill | None = None
    mesh: AnyMesh | None = None
    arrays: Mapping[str, ArraySpec] | None = None
    named: NamedLoss | None = None
    answers: OfAnswers | None = None


@dataclass(frozen=True, kw_only=True)
class ModelProgram:
    """A model's functions, and the specs of their arrays. Fields not described here are those of `Training`.

    Args:
      forward: (params, batch, key) -> `Outputs`; None if the model has a loss of its own only.
      uses_rng: whether `loss` draws random numbers.
      state: parameters that each step changes without a gradient; None if there are none.
      of_rows: see `Training`.
      bounds: array of labels -> the number of classes.
      added: strategies of the loss, such as a copy of the first parameters.
      merged: the parameters with LoRA's -> those of the model alone by path, with each update added; None without LoRA.
    """

    specs: Any
    init: Callable[[jax.Array], Any]
    loss: Loss
    evaluation: Loss
    rules: AxisRules
    forward: Callable[..., Outputs] | None = None
    uses_rng: bool = False
    state: StateParams | None = None
    carried: Any = field(default_factory=dict)
    init_carried: Callable[[jax.Array], Any] = lambda key: {}
    activation_dims: tuple[str, ...] | None = None
    of_rows: Callable[..., dict[str, jax.Array]] | None = None
    bounds: Mapping[str, int] = field(default_factory=dict)
    added: tuple[Strategy, ...] = ()
    merged: Callable[[Any], Mapping[str, jax.Array]] | None = None


class ModelContract(Config):
    """Base of every kind of model that a config can name."""

    reads_positions: ClassVar[bool] = False
    """Whether the loss reads the places of tokens from the batch, so that a row may have them in another order."""

    @property
    def is_local(self) -> bool:
        """Whether the loss is written for local shards; else it is for whole arrays, and is partitioned."""
        return False

    def program(self, task: Task) -> ModelProgram:
        """Returns the functions and specs that a training compiles. Nothing is allocated.

        Raises:
          ConfigError: the model does not fit the task.
        """
        raise NotImplementedError(type(self).__name__)

    def check(self, task: Task, ctx: ParallelContext, problems: Problems) -> None:
        """Reports conflicts of the model's config with the task, the rules or the mesh, without building the model."""

    def selected(self, task: Task, ctx: ParallelContext, batch_size: int) -> dict[str, str]:
        """Key -> what this setting selects for the run's sizes on its mesh. `explain` and `inspect` report it."""
        return {}

    def batch_specs(self, batch_size: int, seq_len: int) -> dict[str, ArraySpec]:
        """Name -> `ArraySpec` of each array of a batch. Default: packed tokens."""
        spec = ArraySpec((batch_size, seq_len), np.dtype("int32"), ("batch", "seq"))
        return dict.fromkeys(ARRAYS, spec)

    def reference(self, scale: Scale) -> Self:
        """Returns a small model of the same structure, for `verify`. Default: the model itself."""
        return self

    def on_any_device(self) -> Self:
        """Returns a model of the same parameters that any device can compute. Default: the model itself."""
        return self

    def array_specs(self) -> Any:
        """Tree of `ArraySpec` of the parameters; None if only importing the model can determine them."""
        return None

    def vocabulary(self) -> int | None:
        """The number of token ids; None if it is not known from the config, or if the inputs are no tokens."""
        return None

    def layer_stack(self) -> LayerStack | None:
        """The layers that a pipeline divides into stages; None if only the trace of the loss has them."""
        return None

    @classmethod
    def architectures(cls) -> Mapping[str, Architecture]:
        """Hugging Face's `model_type` -> the map of its config and tensors to this kind of model."""
        return {}

    @property
    def _name(self) -> str:
        return getattr(self, "kind", type(self).__name__)
