"""The types that map Hugging Face's format to a model: keys of `config.json`, and names and shapes of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pydantic

from meshpar.errors import Problems

Shape = tuple[int, ...]
Json = dict[str, Any]


@dataclass(frozen=True)
class Foreign:
    """A tensor of Hugging Face, a matrix or a vector, that contains one or more of our parameters.

    Args:
      parts: paths of our parameters, which are concatenated along their outputs.
      inputs: how many leading dims of a parameter are inputs, without `layers`; the others are outputs. 0 for a vector.
      outputs_first: whether the tensor is `[out, in]`, as in PyTorch's Linear, instead of `[in, out]`.
    """

    parts: tuple[str, ...]
    inputs: int
    outputs_first: bool = False

    def shape(self, shapes: dict[str, Shape]) -> Shape:
        """Computes the tensor's shape from the shapes of its parts, without `layers`.

        >>> linear("q", "k").shape({"q": (8, 2, 4), "k": (8, 1, 4)})
        (12, 8)
        """
        size_in = math.prod(shapes[self.parts[0]][: self.inputs])
        size_out = sum(math.prod(shapes[part][self.inputs :]) for part in self.parts)
        if not self.inputs:
            return (size_out,)
        return (size_out, size_in) if self.outputs_first else (size_in, size_out)


LAYER = "*"
EXPERT = "#"
Names = dict[str, Foreign]
"""Name of a tensor -> its parameters. `LAYER` and `EXPERT` stand for the index of a layer and of an expert."""


def linear(*parts: str, inputs: int = 1) -> Foreign:
    """A matrix `[out, in]`."""
    return Foreign(parts, inputs, outputs_first=True)


def rows(*parts: str, inputs: int = 1) -> Foreign:
    """A matrix `[in, out]`, such as an embedding, or GPT-2's Conv1D."""
    return Foreign(parts, inputs)


def vector(*parts: str) -> Foreign:
    """A vector `[out]`."""
    return Foreign(parts, inputs=0)


# The config ----------------------------------------------------------------------------------------------------

LARGEST = 2**31 - 1
"""The largest size that is accepted: products of larger sizes could overflow."""
Number = Annotated[float, pydantic.Field(allow_inf_nan=False)]
Size = Annotated[int, pydantic.Field(ge=0, le=LARGEST)]


class Rope(pydantic.BaseModel):
    """`rope_parameters` of transformers 5, or `rope_scaling` of earlier versions."""

    model_config = pydantic.ConfigDict(strict=True)

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Number | None = None
    partial_rotary_factor: Number | None = None
    factor: Number | None = None
    low_freq_factor: Number | None = None
    high_freq_factor: Number | None = None
    original_max_position_embeddings: Size | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _one_for_all_layers(cls, data: Any) -> Any:
        if isinstance(data, dict) and any(isinstance(value, dict) for value in data.values()):
            raise ValueError("rope parameters must be the same for all layer types")
        return data


class Given(pydantic.BaseModel):
    """The keys of a `config.json` that an `Architecture` reads, except sizes. A key that is null counts as missing."""

    model_config = pydantic.ConfigDict(strict=True)

    quantization_config: Any = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    num_hidden_layers: Size = 0
    max_position_embeddings: Size | None = None
    sliding_window: Size | None = None
    use_sliding_window: bool = False
    max_window_layers: Size = 28
    layer_types: list[Literal["full_attention", "sliding_attention"]] = []
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    rope_theta: Number = 10000.0
    partial_rotary_factor: Number = 1.0
    n_embd: Size | None = None
    activation_function: str = "gelu_new"
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False


@dataclass(frozen=True)
class Architecture:
    """Maps one `model_type` of Hugging Face to a kind of model of ours, for reading and writing.

    Args:
      called: the name of the architecture's class in transformers.
      names: the tensors of its checkpoints.
      keys: key of `config.json` -> field of our model with the same value.
      read: config -> our model's other fields; it reports values that are not supported.
      write: our model -> the other keys of the config.
      given: the type of the config that `read` needs.
    """

    called: str
    names: Names
    keys: Mapping[str, str]
    read: Callable[[Given, Problems], Json]
    write: Callable[[Any], Json]
    given: type[Given] = Given
