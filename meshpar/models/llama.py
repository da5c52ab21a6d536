"""Llama: RMSNorm, rotary positions, SwiGLU. Source: Touvron et al. 2023, arXiv:2302.13971.

With its options, the same class is Mistral, Qwen 2, Qwen 3, SmolLM or Phi 3; with experts Mixtral, Qwen 3 MoE or OLMoE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, Literal

import pydantic

from meshpar.config import Coerced, Count, Positive, Section, default
from meshpar.errors import Problems, excerpt
from meshpar.models.decoder import DecoderModel
from meshpar.models.foreign import LARGEST, Architecture, Given, Json, Names, Rope, linear, rows, vector
from meshpar.nn.attention.layer import Bias, QKNorm
from meshpar.nn.experts import Experts
from meshpar.nn.layers import RMSNorm, SwiGLU
from meshpar.nn.rotary import Scaling


class Llama(DecoderModel):
    """A decoder with RMSNorm, rotary positions and SwiGLU.

    >>> Llama(num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, intermediate_size=64).vocabulary()
    257
    """

    kind: Literal["llama"] = "llama"
    norm: ClassVar = RMSNorm
    mlp: ClassVar = SwiGLU
    learned_positions: ClassVar = False

    attn_bias: Bias = "none"
    """Which attention projections have a bias: none, queries, keys and values (Qwen 2), or all."""
    mlp_bias: bool = False
    """Whether the projections of the MLP have a bias."""
    qk_norm: QKNorm = False
    """Which norm queries and keys have: `true` over each head (Qwen 3), `all_heads` over all heads of a token
    (OLMoE)."""
    rotary_fraction: Annotated[float, pydantic.Field(gt=0, le=1)] = 1.0
    """The fraction of each head, from its first element, that is rotated."""
    rope_scaling: Section[Scaling | None] = default(None)
    """How rotary frequencies are scaled for rows longer than in pretraining."""
    window: Positive | None = None
    """How many tokens a query attends to, its own included (Mistral). Default: all up to its own."""
    global_layers: Coerced[tuple[Count, ...], list[int]] = default(())
    """Indices of layers, from 0, that ignore `window`."""

    experts: Section[Experts | None] = default(None)
    """Experts in place of the MLPs. `intermediate_size` then applies to the layers without experts."""

    @pydantic.model_validator(mode="after")
    def _layers_exist(self) -> Llama:
        if beyond := [layer for layer in self.global_layers if layer >= self.num_layers]:
            raise ValueError(f"global_layers: there is no layer {beyond[0]}, only 0 to {self.num_layers - 1}")
        return self

    @classmethod
    def architectures(cls) -> Mapping[str, Architecture]:
        return ARCHITECTURES


# Hugging Face's tensors ------------------------------------------------------------------------------------------

ATTENTION = "model.layers.*.self_attn"
MLP = "model.layers.*.mlp"

HUGGING_FACE: Names = {
    "model.embed_tokens.weight": rows("embedding"),
    "model.norm.weight": vector("norm.scale"),
    "lm_head.weight": linear("head"),
    "model.layers.*.input_layernorm.weight": vector("blocks.attn_norm.scale"),
    "model.layers.*.post_attention_layernorm.weight": vector("blocks.mlp_norm.scale"),
    **{f"{ATTENTION}.{x}_proj.weight": linear(f"blocks.attn.{x}.kernel") for x in "qkv"},
    f"{ATTENTION}.o_proj.weight": linear("blocks.attn.o.kernel", inputs=2),
    **{f"{ATTENTION}.{x}_proj.bias": vector(f"blocks.attn.{x}.bias") for x in "qkvo"},
    **{f"{ATTENTION}.{x}_norm.weight": vector(f"blocks.attn.{x}_norm.scale") for x in "qk"},
    **{f"{MLP}.{x}_proj.weight": linear(f"blocks.mlp.{x}.kernel") for x in ("gate", "up", "down")},
    **{f"{MLP}.{x}_proj.bias": vector(f"blocks.mlp.{x}.bias") for x in ("gate", "up", "down")},
}

_NOT_MLP = {name: foreign for name, foreign in HUGGING_FACE.items() if not name.startswith(MLP)}
MIXTRAL: Names = _NOT_MLP | {
    "model.layers.*.block_sparse_moe.gate.weight": linear("blocks.mlp.router.weight"),
    **{
        f"model.layers.*.block_sparse_moe.experts.#.{theirs}.weight": linear(f"blocks.mlp.experts.{ours}.kernel")
        for theirs, ours in {"w1": "gate", "w3": "up", "w2": "down"}.items()
    },
}
QWEN3_MOE: Names = HUGGING_FACE | {
    f"{MLP}.gate.weight": linear("blocks.mlp.router.weight"),
    **{f"{MLP}.experts.#.{x}_proj.weight": linear(f"blocks.mlp.experts.{x}.kernel") for x in ("gate", "up", "down")},
}

_FUSED: Names = {
    f"{ATTENTION}.qkv_proj.weight": linear(*(f"blocks.attn.{x}.kernel" for x in "qkv")),
    f"{MLP}.gate_up_proj.weight": linear("blocks.mlp.gate.kernel", "blocks.mlp.up.kernel"),
}
_FUSED_PARTS = {part for foreign in _FUSED.values() for part in foreign.parts}
PHI3: Names = {name: f for name, f in HUGGING_FACE.items() if not _FUSED_PARTS & {*f.parts}} | _FUSED
"""The tensors of Phi 3, which stores q, k and v as one, and gate and up as one."""


MOST_EXPERTS = 2**16
"""The largest number of experts that is accepted, so that a damaged config cannot list tensors without end."""

# Hugging Face's config -------------------------------------------------------------------------------------------

QK_NORMS: Mapping[str, QKNorm] = {"qwen3": True, "qwen3_moe": True, "olmoe": "all_heads"}
NEEDS_HEADS_THAT_DIVIDE = ("llama",)
"""Kinds whose class in transformers refuses a `hidden_size` that is no multiple of the heads, also with `head_dim`."""
LLAMA_KEYS = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim", "max_position_embeddings": "max_seq_len", "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}  # fmt: skip
LLAMA3_KEYS = {
    "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_seq_len",
}  # fmt: skip


def _llama(kind: str) -> Callable[[Given, Problems], Json]:
    def read(given: Given, found: Problems) -> Json:
        if given.hidden_act not in ("silu", "swish"):
            found.add("hidden_act", f"{excerpt(repr(given.hidden_act))} is not supported for this model, only silu")
        if (
            kind in NEEDS_HEADS_THAT_DIVIDE
            and given.num_attention_heads
            and given.hidden_size % given.num_attention_heads
        ):
            what = f"{given.hidden_size} is not a multiple of num_attention_heads = {given.num_attention_heads}"
            found.add("hidden_size", f"{what}, as transformers requires for {kind}")
        attn_bias = "qkv" if kind == "qwen2" else "all" if given.attention_bias else "none"
        biases = {"attn_bias": attn_bias, "mlp_bias": given.mlp_bias}
        qk_norm = QK_NORMS.get(kind, False)
        return biases | {"qk_norm": qk_norm} | _window(kind, given, found) | _rope(kind, given, found)

    return read


class GivenExperts(Given):
    """The keys of the experts, as Mixtral, Qwen 3 MoE and OLMoE call them."""

    intermediate_size: Annotated[int, pydantic.Field(ge=1, le=LARGEST)]
    moe_intermediate_size: Annotated[int, pydantic.Field(ge=1, le=LARGEST)] | None = None
    num_local_experts: Annotated[int, pydantic.Field(ge=1, le=MOST_EXPERTS)] | None = None
    num_experts: Annotated[int, pydantic.Field(ge=1, le=MOST_EXPERTS)] | None = None
    num_experts_per_tok: Annotated[int, pydantic.Field(ge=1, le=MOST_EXPERTS)]
    norm_topk_prob: bool = True
    decoder_sparse_step: Annotated[int, pydantic.Field(ge=1, le=LARGEST)] = 1
    mlp_only_layers: list[int] | None = None


def _experts(kind: str) -> Callable[[Given, Problems], Json]:
    def read(given: Given, found: Problems) -> Json:
        assert isinstance(given, GivenExperts)
        dense = given.mlp_only_layers or []
        if sorted(dense) != [*range(len(dense))]:
            found.add("mlp_only_layers", f"is {excerpt(repr(dense))}; only first layers are supported")
        num = given.num_local_experts or given.num_experts
        if num and given.num_experts_per_tok > num:
            found.add("num_experts_per_tok", f"is {given.num_experts_per_tok}, but there are only {num} experts")
        if given.clip_qkv is not None:
            found.add("clip_qkv", f"is {given.clip_qkv}, and only null is supported")
        if kind == "olmoe":
            _check_olmoe(given, found)
        experts = {
            "num": num,
            "per_token": given.num_experts_per_tok,
            "intermediate_size": given.moe_intermediate_size or given.intermediate_size,
            "normalize": given.norm_topk_prob,
            "first_dense": len(dense),
            "every": given.decoder_sparse_step,
        }
        return _llama(kind)(given, found) | {"experts": experts}

    return read


def _check_olmoe(given: Given, found: Problems) -> None:
    """Checks what transformers cannot load, or computes differently with each of its attention kernels."""
    if given.head_dim and given.head_dim * given.num_attention_heads != given.hidden_size:
        what = f"is {given.head_dim}; the norm over all heads has hidden_size / num_attention_heads for each"
        found.add("head_dim", what, f"head_dim: {given.hidden_size // max(1, given.num_attention_heads)}")
    if given.sliding_window is not None:
        found.add("sliding_window", f"is {given.sliding_window}, and only null is supported for olmoe")


def _write_experts(experts: Experts | None) -> Json:
    if experts is None:
        return {}
    return {
        "num_local_experts": experts.num,
        "num_experts": experts.num,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalize,
        "decoder_sparse_step": experts.every,
        "mlp_only_layers": list(range(experts.first_dense)),
    }


def _window(kind: str, given: Given, found: Problems) -> Json:
    window = given.sliding_window
    if kind in ("llama", "olmoe"):
        return {}
    if kind in ("mistral", "phi3", "mixtral"):
        return {"window": window}
    if kind != "ministral" and not given.use_sliding_window:
        window = None
    if kind == "qwen3_moe":
        return {"window": window}
    first = given.max_window_layers if kind in ("qwen2", "qwen3") else 0
    layers = range(given.num_hidden_layers)
    types = given.layer_types
    if types is None:
        types = ["sliding_attention" if window is not None and i >= first else "full_attention" for i in layers]
    if len(types) != len(layers):
        found.add("layer_types", f"has {len(types)} entries for {len(layers)} layers")
    elif window is None and "sliding_attention" in types:
        key = "sliding_window" if kind == "ministral" or given.sliding_window is None else "use_sliding_window"
        found.add(key, "is not set, and layer_types has sliding_attention", "layer_types: null, for no window")
    global_layers = [i for i, type_ in enumerate(types) if type_ == "full_attention"]
    return {} if len(global_layers) == len(layers) else {"window": window, "global_layers": global_layers}


def _rope(kind: str, given: Given, found: Problems) -> Json:
    key = "rope_scaling" if given.rope_scaling else "rope_parameters"  # transformers prefers the older name
    rope = given.rope_scaling or given.rope_parameters or Rope()
    type_ = rope.rope_type or rope.type or "default"
    supported = ("default",) if kind == "phi3" else ("default", "linear", "llama3")
    scaling = None
    if type_ not in supported:
        fix = f"supported: {', '.join(supported)}"
        found.add(key, f"rope_type {excerpt(repr(type_))} is not supported for {kind}", fix)
    elif type_ == "linear":
        scaling = {"kind": "linear", "factor": rope.factor}
    elif type_ == "llama3":
        original = rope.original_max_position_embeddings or given.max_position_embeddings
        parts = rope.model_dump() | {"original_max_position_embeddings": original}
        scaling = {"kind": "llama3"} | {field: parts[key] for key, field in LLAMA3_KEYS.items()}
    given_fractions = (rope.partial_rotary_factor, given.partial_rotary_factor, 1.0)
    fraction = next(one for one in given_fractions if one is not None)
    if fraction != 1 and kind != "phi3":
        found.add("partial_rotary_factor", f"is {fraction}, but only 1 is supported for {kind}")
    head_dim = given.head_dim or given.hidden_size // max(1, given.num_attention_heads)
    if (rotated := int(head_dim * fraction)) % 2:
        found.add("head_dim", f"{rotated} elements of a head are rotated, in pairs, and {rotated} is odd")
    theta = given.rope_theta if rope.rope_theta is None else rope.rope_theta
    return {"rope_theta": theta, "rope_scaling": scaling, "rotary_fraction": fraction}


def _write_llama(model: Llama) -> Json:
    """Writes the keys of all architectures in this file. The export selects one that reads the same model from them."""
    layers = ["full_attention" if i in model.global_layers else "sliding_attention" for i in range(model.num_layers)]
    windows = {"layer_types": layers, "max_window_layers": 0} if model.window and model.global_layers else {}
    scaling = model.rope_scaling and model.rope_scaling.model_dump()
    if scaling:
        names = {field: key for key, field in LLAMA3_KEYS.items()}
        scaling = {"rope_type": scaling.pop("kind")} | {names[field]: value for field, value in scaling.items()}
    return windows | _write_experts(model.experts) | {
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


def _architecture(kind: str, called: str, names: Names = HUGGING_FACE) -> Architecture:
    return Architecture(called, names, LLAMA_KEYS, _llama(kind), _write_llama)


def _sparse(kind: str, called: str, names: Names) -> Architecture:
    return Architecture(called, names, LLAMA_KEYS, _experts(kind), _write_llama, GivenExperts)


ARCHITECTURES = {
    "llama": _architecture("llama", "LlamaForCausalLM"),
    "mistral": _architecture("mistral", "MistralForCausalLM"),
    "ministral": _architecture("ministral", "MinistralForCausalLM"),
    "qwen2": _architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _architecture("qwen3", "Qwen3ForCausalLM"),
    "phi3": _architecture("phi3", "Phi3ForCausalLM", PHI3),
    "mixtral": _sparse("mixtral", "MixtralForCausalLM", MIXTRAL),
    "qwen3_moe": _sparse("qwen3_moe", "Qwen3MoeForCausalLM", QWEN3_MOE),
    "olmoe": _sparse("olmoe", "OlmoeForCausalLM", QWEN3_MOE),
}
"""By `model_type`. An export selects the first one that computes the same as the model."""
