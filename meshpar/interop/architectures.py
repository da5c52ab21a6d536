"""Converts the `config.json` of a Hugging Face model to a model of meshpar, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import pydantic

from meshpar.errors import Problems, excerpt, nearest
from meshpar.models import GPT, Llama, gpt, llama
from meshpar.models.foreign import Names
from meshpar.nn.transformer import Decoder

Json = dict[str, Any]
LLAMA_KEYS = {
    "vocab_size": "vocab_size", "hidden_size": "width", "intermediate_size": "mlp_width",
    "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim", "max_position_embeddings": "max_seq_len", "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied",
}  # fmt: skip
GPT2_KEYS = {
    "vocab_size": "vocab_size", "n_embd": "width", "n_inner": "mlp_width", "n_layer": "num_layers",
    "n_head": "num_heads", "n_positions": "max_seq_len", "layer_norm_epsilon": "norm_eps",
    "tie_word_embeddings": "tied",
}  # fmt: skip
LLAMA3_KEYS = {
    "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_seq_len",
}  # fmt: skip

LARGEST = 2**31 - 1
"""The largest size that is read: products of larger ones overflow."""
Number = Annotated[float, pydantic.Field(allow_inf_nan=False)]
Size = Annotated[int, pydantic.Field(ge=0, le=LARGEST)]


class Rope(pydantic.BaseModel):
    """`rope_parameters`, which transformers 5 writes, or `rope_scaling`, which earlier versions wrote."""

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
            raise ValueError("rope parameters that differ between layer types are not supported")
        return data


class Given(pydantic.BaseModel):
    """The keys of a `config.json` that are read, apart from sizes. A null key counts as missing."""

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
    """One `model_type`.

    Args:
      called: the name of its class in transformers.
      names: its tensors.
      keys: key of `config.json` -> field of our model.
      read: our model's other fields, from the config; reports what is not supported.
      write: the config's other keys, from our model.
    """

    model: type[Llama] | type[GPT]
    called: str
    names: Names
    keys: Mapping[str, str]
    read: Callable[[Given, Problems], Json]
    write: Callable[[Any], Json]


def read(config: Json, where: str, problems: Problems, most_layers: int = LARGEST) -> Decoder | None:
    """The model that a `config.json` describes; None if it is not supported, with the reasons in `problems`.

    Args:
      where: the file's name in the problems.
      most_layers: an upper bound on the number of layers: 1e9 layers are refused before a tensor of each is listed.
    """
    kind = config.get("model_type")
    found = Problems()
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        near = nearest(str(kind), ARCHITECTURES)
        fix = f"supported: {', '.join(ARCHITECTURES)}" + (f"; did you mean {near}?" if near else "")
        problems.add(f"{where}: model_type", f"{kind!r} is not supported", fix)
        return None
    architecture = ARCHITECTURES[kind]
    given = {key: value for key, value in config.items() if value is not None}
    sizes = {field: given[key] for key, field in architecture.keys.items() if key in given}
    _check_sizes(sizes, architecture, most_layers, found)
    extra = _extra(architecture, given, found) if not found else {}
    model = None
    try:
        model = architecture.model.model_validate_json(json.dumps(extra | sizes), strict=True)
    except pydantic.ValidationError as invalid:
        _report(invalid, {field: key for key, field in architecture.keys.items()}, found)
    for problem in found.found:
        problems.add(f"{where}: {problem.where}", problem.what, problem.fix)
    return None if found else model


def _check_sizes(sizes: Json, architecture: Architecture, most_layers: int, found: Problems) -> None:
    """Reports sizes that would overflow, or take very long to compute with."""
    for key, field in architecture.keys.items():
        value = sizes.get(field)
        if isinstance(value, float) and not math.isfinite(value):
            found.add(key, f"{value} is not finite")
        elif isinstance(value, (int, float)) and value > LARGEST:
            found.add(key, f"is larger than {LARGEST}")
        elif isinstance(value, int) and field == "num_layers" and value > most_layers:
            found.add(key, f"is {value}, but there are tensors for at most {most_layers} layers")


def _extra(architecture: Architecture, given: Json, found: Problems) -> Json:
    """Our model's fields that are not sizes, from the config."""
    try:
        read = Given.model_validate(given)
    except pydantic.ValidationError as invalid:
        _report(invalid, {}, found)
        return {}
    if read.quantization_config:
        found.add("quantization_config", "quantized checkpoints are not supported", "download the one in bfloat16")
    return architecture.read(read, found)


def _report(invalid: pydantic.ValidationError, keys: Mapping[str, str], found: Problems) -> None:
    """Adds pydantic's errors, under the keys of the file, except for keys that have a problem already."""
    known = {problem.where for problem in found.found}
    for error in invalid.errors(include_url=False):
        name = ".".join(map(str, error["loc"])) or "sizes"
        key = keys.get(name, name)
        if key not in known:
            is_missing = error["type"] == "missing"
            what = "required, but missing" if is_missing else f"{error['msg']}, got {excerpt(repr(error['input']))}"
            found.add(key, what)


def write(model: Decoder, original: Json | None = None) -> Json | None:
    """A `config.json` for a model; None if no architecture computes the same.

    Args:
      original: the config from which the model may have come: if it still describes the model, it is returned.
    """
    for config in [original or {}, *(_written(model, kind) for kind in ARCHITECTURES)]:
        described = read(config, "", Problems(), model.num_layers)
        if described is not None and canonical(described) == canonical(model):
            return config
    return None


def _written(model: Decoder, kind: str) -> Json:
    architecture = ARCHITECTURES[kind]
    if not isinstance(model, architecture.model):
        return {}
    plain = canonical(model)
    sizes = {key: getattr(plain, field) for key, field in architecture.keys.items()}
    return {"model_type": kind, "architectures": [architecture.called]} | sizes | architecture.write(plain)


def canonical(model: Decoder) -> Decoder:
    """The model with its defaults written out, without the fields that matter only for training."""
    sizes = {"num_kv_heads": model.kv_heads, "head_dim": model.head_size}
    return model.model_copy(update=sizes | {"vocab_multiple": 1, "layers_multiple": 1, "dropout": 0.0, "remat": "none"})


# Llama and the models that share its class ------------------------------------------------------------------------


def _read_llama(kind: str, given: Given, found: Problems) -> Json:
    if given.hidden_act not in ("silu", "swish"):
        found.add("hidden_act", f"{excerpt(repr(given.hidden_act))} is not supported for this model, only silu")
    attn_bias = "qkv" if kind == "qwen2" else "all" if kind != "mistral" and given.attention_bias else "none"
    biases = {"attn_bias": attn_bias, "mlp_bias": kind == "llama" and given.mlp_bias}
    return biases | {"head_norm": kind == "qwen3"} | _window(kind, given, found) | _rope(kind, given, found)


def _window(kind: str, given: Given, found: Problems) -> Json:
    window = given.sliding_window
    if kind in ("mistral", "phi3"):
        return {"window": window}
    if kind == "llama" or not given.use_sliding_window or window is None:
        return {}
    layers = range(given.num_hidden_layers)
    if given.layer_types and len(given.layer_types) != len(layers):
        found.add("layer_types", f"has {len(given.layer_types)} entries for {len(layers)} layers")
    types = given.layer_types or [
        "full_attention" if i < given.max_window_layers else "sliding_attention" for i in layers
    ]
    full = [i for i, type_ in enumerate(types) if type_ == "full_attention"]
    return {} if len(full) == len(layers) else {"window": window, "full_layers": full}


def _rope(kind: str, given: Given, found: Problems) -> Json:
    key = "rope_parameters" if given.rope_parameters else "rope_scaling"
    rope = given.rope_parameters or given.rope_scaling or Rope()
    type_ = rope.rope_type or rope.type or "default"
    scaling = None
    if type_ == "linear":
        scaling = {"kind": "linear", "factor": rope.factor}
    elif type_ == "llama3":
        original = rope.original_max_position_embeddings or given.max_position_embeddings
        parts = rope.model_dump() | {"original_max_position_embeddings": original}
        scaling = {"kind": "llama3"} | {field: parts[key] for key, field in LLAMA3_KEYS.items()}
    elif type_ != "default":
        found.add(key, f"rope_type {excerpt(repr(type_))} is not supported", "supported: default, linear, llama3")
    fraction = given.partial_rotary_factor if rope.partial_rotary_factor is None else rope.partial_rotary_factor
    if fraction != 1 and kind != "phi3":
        found.add("partial_rotary_factor", f"is {fraction}, and a {kind} is supported with 1 only")
    theta = given.rope_theta if rope.rope_theta is None else rope.rope_theta
    return {"rope_theta": theta, "rope_scaling": scaling, "rotary_fraction": fraction}


def _write_llama(model: Llama) -> Json:
    """Keys that a `model_type` ignores do no harm: `write` reads each config back before it chooses one."""
    layers = ["full_attention" if i in model.full_layers else "sliding_attention" for i in range(model.num_layers)]
    windows = {"layer_types": layers, "max_window_layers": 0} if model.window and model.full_layers else {}
    scaling = model.rope_scaling and model.rope_scaling.model_dump()
    if scaling:
        names = {field: key for key, field in LLAMA3_KEYS.items()}
        scaling = {"rope_type": scaling.pop("kind")} | {names[field]: value for field, value in scaling.items()}
    return windows | {
        "hidden_act": "silu",
        "attention_bias": model.attn_bias == "all",
        "mlp_bias": model.mlp_bias,
        "sliding_window": model.window,
        "use_sliding_window": model.window is not None,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "partial_rotary_factor": model.rotary_fraction,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip


# GPT-2 --------------------------------------------------------------------------------------------------------


def _read_gpt2(given: Given, found: Problems) -> Json:
    if given.activation_function not in ("gelu_new", "gelu_pytorch_tanh"):
        what = f"{excerpt(repr(given.activation_function))} is not supported for this model, only gelu_new"
        found.add("activation_function", what)
    if not given.scale_attn_weights:
        found.add("scale_attn_weights", "only true is supported")
    if given.scale_attn_by_inverse_layer_idx:
        found.add("scale_attn_by_inverse_layer_idx", "only false is supported")
    return {"tied": True} | ({"mlp_width": 4 * given.n_embd} if given.n_embd else {})


def _llama_like(kind: str, called: str, names: Names = llama.HUGGING_FACE) -> Architecture:
    return Architecture(Llama, called, names, LLAMA_KEYS, partial(_read_llama, kind), _write_llama)


ARCHITECTURES = {
    "llama": _llama_like("llama", "LlamaForCausalLM"),
    "mistral": _llama_like("mistral", "MistralForCausalLM"),
    "qwen2": _llama_like("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _llama_like("qwen3", "Qwen3ForCausalLM"),
    "phi3": _llama_like("phi3", "Phi3ForCausalLM", llama.PHI3),
    "gpt2": Architecture(
        GPT, "GPT2LMHeadModel", gpt.HUGGING_FACE, GPT2_KEYS, _read_gpt2,
        lambda model: {"activation_function": "gelu_new", "bos_token_id": None, "eos_token_id": None},
    ),
}  # fmt: skip
"""By `model_type`. `write` chooses the first one that computes the same."""
