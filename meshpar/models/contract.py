"""The model contract: what every kind of model answers to the code that trains, verifies, serves or converts it.

A kind of model is a config, such as `Llama` or `Import`. It inherits from `ModelContract` and overrides the answers
that it can give; for the others the base class returns `Unsupported`, which is falsy and holds the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import jax
import numpy as np

from meshpar.config import Config
from meshpar.errors import Problems
from meshpar.models.foreign import Architecture
from meshpar.models.reference import Scale
from meshpar.nn.lora import LoRA
from meshpar.nn.supported import Sharding
from meshpar.parallel.context import ParallelContext
from meshpar.parallel.outputs import Outputs
from meshpar.parallel.pipeline.model import PipelineModel
from meshpar.sharding.rules import AxisRules
from meshpar.sharding.spec import ArraySpec
from meshpar.train.data.packing import ARRAYS
from meshpar.train.loss import Distill, Loss, LossConfig

if TYPE_CHECKING:
    from meshpar.models.decoder import DecoderModel


@dataclass(frozen=True)
class Unsupported:
    """The answer of a model that does not support what it is asked for. It is falsy.

    >>> answer = Unsupported("a bag of words has no layers")
    >>> answer.because if not answer else "supported"
    'a bag of words has no layers'
    """

    because: str

    def __bool__(self) -> Literal[False]:
        return False


class Vocabulary(NamedTuple):
    """How many token ids a model has, and how many rows its embedding has with the padding."""

    size: int
    padded: int


class LayerStack(NamedTuple):
    """How many layers a model has, and the number that their stack is rounded up to a multiple of."""

    num_layers: int
    multiple: int

    @property
    def stacked_layers(self) -> int:
        """Rows of the layers' parameters, padding included."""
        return -(-self.num_layers // self.multiple) * self.multiple


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a run asks its model to learn.

    Args:
      loss: what is minimized.
      rules: of the run.
      seq_len: tokens of a row.
      vocab_size: token ids of the data.
      seed: of the run.
      adapter: trained in place of the model, which is frozen.
      distill: a teacher to learn from.
    """

    loss: LossConfig
    rules: AxisRules
    seq_len: int
    vocab_size: int
    seed: int
    adapter: LoRA | None = None
    distill: Distill | None = None


@dataclass(frozen=True, kw_only=True)
class ModelProgram:
    """A model's functions and what they compute with. See `Training` for the fields that have the same name there.

    Args:
      forward: (params, batch, key) -> `Outputs`; None if only `loss` computes them.
      uses_rng: whether `loss` draws random numbers.
      parts: the model as a pipeline sees it; None if it cannot be cut into stages.
    """

    specs: Any
    init: Callable[[jax.Array], Any]
    loss: Loss
    evaluation: Loss
    rules: AxisRules
    forward: Callable[..., Outputs] | None = None
    uses_rng: bool = False
    parts: PipelineModel | None = None
    carried: Any = field(default_factory=dict)
    init_carried: Callable[[jax.Array], Any] = lambda key: {}
    activation_dims: tuple[str, ...] | None = None


class ModelContract(Config):
    """Base of every kind of model that a config can name."""

    def program(self, task: Task) -> ModelProgram:
        """What a training computes with. Nothing is allocated.

        Raises:
          ConfigError: the model does not fit the task.
        """
        raise NotImplementedError(type(self).__name__)

    def check(self, task: Task, ctx: ParallelContext, problems: Problems) -> None:
        """Adds what in the model's config does not fit the task, the rules or the mesh. It builds nothing."""

    def batch_specs(self, batch_size: int, seq_len: int) -> dict[str, ArraySpec]:
        """Name -> `ArraySpec` of an array of a batch. Default: those of packed tokens."""
        spec = ArraySpec((batch_size, seq_len), np.dtype("int32"), ("batch", "seq"))
        return dict.fromkeys(ARRAYS, spec)

    def reference(self, scale: Scale) -> Self:
        """A small model of the same structure, on which a layout is verified. Default: the model itself."""
        return self

    @property
    def sharding(self) -> tuple[Sharding, ...]:
        """How its layers can have dims sharded, see `nn.supported`. Default: in every way."""
        return ()

    def array_specs(self) -> Any:
        """Tree of `ArraySpec`, of its parameters; None if they are not known without importing the model."""
        return None

    def vocabulary(self) -> Vocabulary | Unsupported:
        return Unsupported(f"the vocabulary of a model of kind {self._name} is not known from its config")

    def manual_lowering(self) -> Literal[True] | Unsupported:
        """Whether its code is written for local shards, with the communication that they need."""
        return Unsupported(f"a model of kind {self._name} is not written for local shards")

    def layer_stack(self) -> LayerStack | Unsupported:
        """The layers between which a pipeline cuts it into stages."""
        return Unsupported(f"a model of kind {self._name} has no stack of layers that stages could divide")

    def generation(self) -> DecoderModel | Unsupported:
        """The decoder that generates tokens with a cache."""
        return Unsupported("only meshpar's own decoders keep keys and values of tokens")

    def hugging_face(self) -> DecoderModel | Unsupported:
        """The decoder that can be exchanged with Hugging Face's libraries."""
        return Unsupported(f"a model of kind {self._name}, and Hugging Face has no architecture for it")

    @classmethod
    def architectures(cls) -> Mapping[str, Architecture]:
        """`model_type` of Hugging Face -> how that architecture's config and tensors map to this kind of model."""
        return {}

    @property
    def _name(self) -> str:
        return getattr(self, "kind", type(self).__name__)
