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

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
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
    """The keys of a `config.json` that an `Architecture` reads, except sizes.

    The values are those of transformers' config class, with its defaults: see `architectures.completed`. A default here
    is for keys that a class does not have.
    """

    model_config = pydantic.ConfigDict(strict=True)

    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    clip_qkv: Number | None = None
    hidden_size: Size = 0
    num_hidden_layers: Size = 0
    num_attention_heads: Size = 0
    head_dim: Size | None = None
    max_position_embeddings: Size | None = None
    sliding_window: Size | None = None
    use_sliding_window: bool = False
    max_window_layers: Size = 0
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    rope_theta: Number = 10000.0
    partial_rotary_factor: Number | None = None
    n_embd: Size = 0
    n_inner: Size | None = None
    activation_function: str = "gelu_new"


REQUIRED: Json = {
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "per_layer_config": None,
    "quantization_config": None,
}
"""Keys of `config.json` of which only one value is supported. Any other value is refused."""
WITHOUT_EFFECT = frozenset({
    # of the file, and of what a model returns
    "transformers_version", "architectures", "dtype", "output_hidden_states", "return_dict", "use_cache",
    "output_router_logits", "id2label", "label2id", "problem_type",
    # of training: dropout, the first weights, losses beside that of the next token
    "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "initializer_range", "router_aux_loss_coef",
    "router_jitter_noise",
    # of the way in which the same numbers are computed
    "chunk_size_feed_forward", "pretraining_tp", "reorder_and_upcast_attn",
    # of classifiers
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    # of `longrope`, which is refused
    "original_max_position_embeddings",
    # of generation: `interop.ends` reads the end ids
    "bos_token_id", "eos_token_id", "pad_token_id",
})  # fmt: skip
"""Keys of transformers' config classes that do not change the logits of a model that generates text."""
OUTSIDE = frozenset({
    # of the file, of the program that wrote it, and of what a model returns
    "model_type", "torch_dtype", "auto_map", "tokenizer_class", "task_specific_params", "finetuning_task",
    "output_attentions", "use_return_dict", "unsloth_fixed", "unsloth_version", "transformers.js_config",
    # of training, of encoders, of the way in which the same numbers are computed
    "num_labels", "classifier_dropout", "gradient_checkpointing", "is_decoder", "tie_encoder_decoder",
    "cross_attention_hidden_size", "attn_implementation", "torchscript", "tf_legacy_loss", "use_bfloat16",
    # other names of a size, and what Qwen's layers with a window would count
    "n_ctx", "model_max_length", "seq_length", "max_window_layers", "is_llama_config", "predict_special_tokens",
    # of generation: older versions of transformers kept them in this file
    "bad_words_ids", "begin_suppress_tokens", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "output_scores", "prefix", "remove_invalid_values", "repetition_penalty",
    "return_dict_in_generate", "sep_token_id", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
    "max_new_tokens", "epsilon_cutoff", "eta_cutoff", "encoder_repetition_penalty", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind",
})  # fmt: skip
"""Keys that published files have, a config class does not, and that change no logit."""
NEUTRAL: Json = {
    "attention_bias": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "pruned_heads": {},
    "rope_interleaved": False,
    "use_mrope": False,
    "use_sliding_window": False,
}
"""The values with which keys that a config class does not have ask for nothing. Any other value is refused."""


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
