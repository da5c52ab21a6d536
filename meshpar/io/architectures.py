"""`config.json` of Hugging Face's models to a model of meshpar, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pydantic

from meshpar.errors import Problems, nearest
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


@dataclass(frozen=True)
class Architecture:
    """One `model_type`.

    Args:
      called: its class in transformers.
      names: of its tensors.
      keys: of `config.json` -> field of our model.
      read: what follows from the config beside `keys`; adds what is not supported to the problems.
      write: what stands in the config beside `keys`, for a model that this architecture may fit or not.
    """

    model: type[Llama] | type[GPT]
    called: str
    names: Names
    keys: Mapping[str, str]
    read: Callable[[Json, Problems], Json]
    write: Callable[[Any], Json]


def read(config: Json, where: str, problems: Problems) -> Decoder | None:
    """The model that a `config.json` describes; None, and why, if there is none.

    Args:
      where: what the problems call it.
    """
    kind, found = config.get("model_type"), Problems()
    if kind not in ARCHITECTURES:
        near = nearest(str(kind), ARCHITECTURES)
        meant = f"did you mean {near}? " if near else ""
        problems.add(
            f"{where}: model_type", f"no model is called {kind!r}", f"{meant}There are {', '.join(ARCHITECTURES)}"
        )
        return None
    if config.get("quantization_config"):
        found.add("quantization_config", "quantized checkpoints are not read", "fetch the one in bfloat16")
    architecture, model = ARCHITECTURES[kind], None
    fields = {field: config[key] for key, field in architecture.keys.items() if config.get(key) is not None}
    try:
        text = json.dumps(architecture.read(config, found) | fields)
        model = architecture.model.model_validate_json(text, strict=True)
    except pydantic.ValidationError as invalid:
        keys = {field: key for key, field in architecture.keys.items()}
        for error in invalid.errors():
            name = str(error["loc"][0]) if error["loc"] else "sizes"
            what = "required, but missing" if error["type"] == "missing" else f"{error['msg']}, got {error['input']!r}"
            found.add(keys.get(name, name), what)
    for problem in found.found:
        problems.add(f"{where}: {problem.where}", problem.what, problem.fix)
    return None if found else model


def write(model: Decoder, original: Json | None = None) -> Json | None:
    """A `config.json` for a model; None if no architecture computes what it does.

    Args:
      original: a config from which it may have come: if it fits, it stays.
    """
    candidates = [original or {}, *(_written(model, kind) for kind in ARCHITECTURES)]
    return next((config for config in candidates if _same(read(config, "", Problems()), model)), None)


def _written(model: Decoder, kind: str) -> Json:
    architecture = ARCHITECTURES[kind]
    if not isinstance(model, architecture.model):
        return {}
    plain = canonical(model)
    sizes = {key: getattr(plain, field) for key, field in architecture.keys.items()}
    return {"model_type": kind, "architectures": [architecture.called]} | sizes | architecture.write(plain)


def canonical(model: Decoder) -> Decoder:
    """The model with its defaults written out, without what is of its training only."""
    sizes = {"num_kv_heads": model.kv_heads, "head_dim": model.head_size}
    return model.model_copy(update=sizes | {"vocab_multiple": 1, "layers_multiple": 1, "dropout": 0.0, "remat": "none"})


def _same(a: Decoder | None, b: Decoder) -> bool:
    return a is not None and canonical(a) == canonical(b)


# Llama and its kin --------------------------------------------------------------------------------------------


def _llama(kind: str) -> Callable[[Json, Problems], Json]:
    def read(config: Json, found: Problems) -> Json:
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            found.add("hidden_act", f"there is no {config['hidden_act']!r} for this model, only silu")
        attn_bias = (
            "qkv" if kind == "qwen2" else "all" if kind != "mistral" and config.get("attention_bias") else "none"
        )
        biases = {"attn_bias": attn_bias, "mlp_bias": kind == "llama" and bool(config.get("mlp_bias"))}
        return biases | {"head_norm": kind == "qwen3"} | _window(kind, config) | _rope(kind, config, found)

    return read


def _window(kind: str, config: Json) -> Json:
    window = config.get("sliding_window")
    if kind in ("mistral", "phi3"):
        return {"window": window}
    if kind == "llama" or not config.get("use_sliding_window") or window is None:
        return {}
    layers = range(config.get("num_hidden_layers", 0))
    types = config.get("layer_types") or [
        "full_attention" if i < config.get("max_window_layers", 28) else "sliding_attention" for i in layers
    ]
    full = [i for i, type_ in enumerate(types) if type_ == "full_attention"]
    return {} if len(full) == len(layers) else {"window": window, "full_layers": full}


def _rope(kind: str, config: Json, found: Problems) -> Json:
    """As transformers 5 writes it, in `rope_parameters`, or as those before did."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    type_ = rope.get("rope_type", rope.get("type", "default"))
    scaling = None
    if type_ == "linear":
        scaling = {"kind": "linear", "factor": rope.get("factor")}
    elif type_ == "llama3":
        given = {"original_max_position_embeddings": config.get("max_position_embeddings")} | rope
        scaling = {"kind": "llama3"} | {field: given.get(key) for key, field in LLAMA3_KEYS.items()}
    elif type_ != "default":
        found.add(key, f"there is no rope_type {type_!r}", "there are default, linear, llama3")
    fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if fraction != 1 and kind != "phi3":
        found.add("partial_rotary_factor", f"a {kind} turns whole heads, here it is {fraction}")
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    return {"rope_theta": theta, "rope_scaling": scaling, "rotary_fraction": fraction}


def _write_llama(model: Llama) -> Json:
    """A key that a `model_type` does not know is of no effect there: `write` sees that, and takes another."""
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


def _gpt2(config: Json, found: Problems) -> Json:
    if config.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"):
        found.add("activation_function", f"there is no {config['activation_function']!r} for this model, only gelu_new")
    for key, value in {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}.items():
        if config.get(key, value) != value:
            found.add(key, f"only {json.dumps(value)} is supported")
    width = config.get("n_embd")
    return {"tied": True} | ({"mlp_width": 4 * width} if isinstance(width, int) else {})


def _write_gpt2(model: GPT) -> Json:
    return {"activation_function": "gelu_new", "bos_token_id": None, "eos_token_id": None}


def _kin(kind: str, called: str, names: Names = llama.HUGGING_FACE) -> Architecture:
    return Architecture(Llama, called, names, LLAMA_KEYS, _llama(kind), _write_llama)


ARCHITECTURES = {
    "llama": _kin("llama", "LlamaForCausalLM"),
    "mistral": _kin("mistral", "MistralForCausalLM"),
    "qwen2": _kin("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _kin("qwen3", "Qwen3ForCausalLM"),
    "phi3": _kin("phi3", "Phi3ForCausalLM", llama.PHI3),
    "gpt2": Architecture(GPT, "GPT2LMHeadModel", gpt.HUGGING_FACE, GPT2_KEYS, _gpt2, _write_gpt2),
}
"""By `model_type`; of several that compute the same, the first is written."""
