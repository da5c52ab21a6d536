"""Families with experts: Qwen 2 MoE, PhiMoE, GLM 4.5, gpt-oss; and DeepSeek V2 and V3, with latent attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshpar.models.families.family import LAYER, Family, experts, named
from meshpar.models.families.keys import FULL, SLIDING, Keys
from meshpar.models.families.layer_norm import layer_norm
from meshpar.models.families.llama_like import attention, biases, decoder, mlp, rms, windowed
from meshpar.models.families.options import MLP, DecoderOptions, Experts, Latent, Layer, Norm
from meshpar.models.foreign import Names, linear, rows, vector


def _qwen2_moe(keys: Keys) -> DecoderOptions:
    num = keys.num_layers
    of = attention(keys, qkv_bias=keys.flag("qkv_bias"))
    uses, last = keys.flag("use_sliding_window"), keys.size("max_window_layers", least=0)
    types = [SLIDING if uses and i % 2 == 0 and i < last else FULL for i in range(num)]
    if not uses:
        keys.value("sliding_window")
    windows = keys.windows(types) if uses else [None for _ in keys.layer_list("layer_types", types, (FULL,))]
    sparse = Experts(
        mlp=MLP(width=keys.size("moe_intermediate_size"), act=keys.act()), num=keys.num_experts("num_experts"),
        per_token=keys.per_token("num_experts"), normalize=keys.flag("norm_topk_prob"),
        shared=keys.size("shared_expert_intermediate_size"), shared_gate=True,
    )  # fmt: skip
    dense, every = keys.index_list("mlp_only_layers"), keys.size("decoder_sparse_step")
    plain = mlp(keys)
    layers = [
        Layer(
            attention=replace(of, window=one),
            mlp=plain if i in dense or (i + 1) % every else sparse,
        )
        for i, one in enumerate(windows)
    ]
    return decoder(keys, layers, rms(keys))


def _phimoe(keys: Keys) -> DecoderOptions:
    keys.only("num_experts_per_tok", 2, "its router chooses two")
    sparse = Experts(
        mlp=mlp(keys), num=keys.num_experts("num_local_experts"), per_token=2, router="sparsemixer",
        jitter=keys.number("router_jitter_noise"),
    )  # fmt: skip
    of = attention(keys, window=keys.some_size("sliding_window"), **biases(keys))
    norm = layer_norm(keys, "rms_norm_eps")
    return decoder(keys, Layer(attention=of, mlp=sparse), norm, head_bias=keys.flag("lm_head_bias"))


def _sigmoid(keys: Keys, act: Any) -> Experts:
    """The experts of DeepSeek V3, which GLM 4.5 has too."""
    return Experts(
        mlp=MLP(width=keys.size("moe_intermediate_size"), act=act), num=keys.num_experts("n_routed_experts"),
        per_token=keys.per_token("n_routed_experts"), router="sigmoid", normalize=keys.flag("norm_topk_prob"),
        scale=keys.number("routed_scaling_factor"), has_choice_bias=True,
        shared=keys.size("n_shared_experts") * keys.size("moe_intermediate_size"), **keys.groups("n_routed_experts"),
    )  # fmt: skip


def _after_dense(keys: Keys, of: Any, sparse: Experts) -> list[Layer]:
    first = keys.size("first_k_dense_replace", least=0)
    dense = mlp(keys)
    return [Layer(attention=of, mlp=dense if i < first else sparse) for i in range(keys.num_layers)]


def _glm4_moe(keys: Keys) -> DecoderOptions:
    norm = rms(keys)
    of = attention(
        keys, rope=keys.rope(fraction=0.5), qkv_bias=keys.flag("attention_bias"),
        qk_norm=norm if keys.flag("use_qk_norm") else None,
    )  # fmt: skip
    return decoder(keys, _after_dense(keys, of, _sigmoid(keys, keys.act())), norm)


def _latent(keys: Keys, **rope: Any) -> Latent:
    heads, rotated = keys.size("num_attention_heads"), keys.size("qk_rope_head_dim")
    if (of_keys := keys.some_size("num_key_value_heads", heads)) != heads:
        keys.wrong("num_key_value_heads", f"is {of_keys}, and each head has its keys: {heads}")
    nope = keys.size("qk_nope_head_dim")
    of = keys.rope(rotated, **rope)
    scale = (nope + rotated) ** -0.5
    return Latent(
        heads=heads, q_rank=keys.some_size("q_lora_rank"), kv_rank=keys.size("kv_lora_rank"), nope_dim=nope,
        value_dim=keys.size("v_head_dim"), scale=scale * keys.yarn_scale() ** 2, rope=of, norm=Norm(eps=1e-6),
        bias=keys.flag("attention_bias"),
    )  # fmt: skip


def _deepseek2(keys: Keys) -> DecoderOptions:
    method = keys.choice("topk_method", ("greedy", "group_limited_greedy"))
    keys.value("norm_topk_prob")  # which transformers reads, and does not use
    groups: dict[str, Any] = keys.groups("n_routed_experts") if method != "greedy" else {}
    for unused in ("n_group", "topk_group"):
        keys.value(unused)
    sparse = Experts(
        mlp=MLP(width=keys.size("moe_intermediate_size"), act=keys.act()), num=keys.num_experts("n_routed_experts"),
        per_token=keys.per_token("n_routed_experts"), scale=keys.number("routed_scaling_factor"), group_score="best",
        shared=keys.size("n_shared_experts") * keys.size("moe_intermediate_size"), **groups,
    )  # fmt: skip
    if keys.flag("mlp_bias"):
        keys.wrong("mlp_bias", "is true, and only false is supported for this model")
    return decoder(keys, _after_dense(keys, _latent(keys, is_interleaved=True), sparse), rms(keys))


def _deepseek3(keys: Keys) -> DecoderOptions:
    is_interleaved = keys.flag("rope_interleave")
    of = _latent(keys, is_interleaved=is_interleaved, is_unzipped=is_interleaved)
    return decoder(keys, _after_dense(keys, of, _sigmoid(keys, keys.act())), rms(keys))


def _gpt_oss(keys: Keys) -> DecoderOptions:
    usual = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
             "original_max_position_embeddings": 4096}  # fmt: skip
    keys.only("swiglu_alpha", 1.702, "only 1.702 is supported")
    keys.only("swiglu_limit", 7.0, "only 7.0 is supported")
    keys.only("hidden_act", "silu", "only silu is supported for this model")
    of = attention(keys, rope=keys.rope(plain=usual), has_sinks=True, **biases(keys))
    sparse = Experts(
        mlp=MLP(width=keys.size("intermediate_size"), act="gpt_oss", bias=True),
        num=keys.num_experts("num_local_experts"), per_token=keys.per_token("num_local_experts"),
        router="softmax_chosen", router_bias=True,
    )  # fmt: skip
    return decoder(keys, windowed(of, sparse, keys.windows_but_every(2)), rms(keys))


_MLP = "model.layers.*.mlp"
_SHARED: Names = {
    f"{_MLP}.shared_experts.{x}_proj.weight": linear(f"{LAYER}.mlp.shared.{x}.kernel") for x in ("gate", "up", "down")
}
_ROUTED: Names = experts(f"{_MLP}.experts", "gate_proj", "up_proj", "down_proj") | {
    f"{_MLP}.gate.weight": linear(f"{LAYER}.mlp.router.kernel"),
    f"{_MLP}.gate.e_score_correction_bias": vector(f"{LAYER}.mlp.choice_bias"),
}
_SPARSE = "model.layers.*.block_sparse_moe"
_ATTN = "model.layers.*.self_attn"
_LATENT: Names = {
    f"{_ATTN}.q_a_proj.weight": linear(f"{LAYER}.attn.q_a.kernel"),
    f"{_ATTN}.q_a_proj.bias": vector(f"{LAYER}.attn.q_a.bias"),
    f"{_ATTN}.q_a_layernorm.weight": vector(f"{LAYER}.attn.q_a_norm.scale"),
    f"{_ATTN}.q_b_proj.weight": linear(f"{LAYER}.attn.q_b.kernel"),
    f"{_ATTN}.kv_a_proj_with_mqa.weight": linear(f"{LAYER}.attn.kv_a.kernel"),
    f"{_ATTN}.kv_a_proj_with_mqa.bias": vector(f"{LAYER}.attn.kv_a.bias"),
    f"{_ATTN}.kv_a_layernorm.weight": vector(f"{LAYER}.attn.kv_a_norm.scale"),
    f"{_ATTN}.kv_b_proj.weight": linear(f"{LAYER}.attn.kv_b.kernel"),
}
_DEEPSEEK = named(more=_ROUTED | _SHARED | _LATENT)
_COMPUTED = frozenset({"head_dim", "qk_head_dim"})
FAMILIES = {
    "qwen2_moe": Family(
        _qwen2_moe,
        named(
            more=_ROUTED
            | {name.replace("shared_experts", "shared_expert"): foreign for name, foreign in _SHARED.items()}
            | {f"{_MLP}.shared_expert_gate.weight": linear(f"{LAYER}.mlp.shared_gate.kernel")}
        ),
    ),
    "phimoe": Family(
        _phimoe,
        named(
            more=experts(f"{_SPARSE}.experts", "w1", "w3", "w2")
            | {f"{_SPARSE}.gate.weight": linear(f"{LAYER}.mlp.router.kernel")}
        ),
    ),
    "glm4_moe": Family(_glm4_moe, named(more=_ROUTED | _SHARED)),
    "deepseek_v2": Family(_deepseek2, _DEEPSEEK, computed=_COMPUTED),
    "deepseek_v3": Family(_deepseek3, _DEEPSEEK, computed=_COMPUTED),
    "kimi_k2": Family(_deepseek3, _DEEPSEEK, called="deepseek_v3", computed=_COMPUTED),
    "gpt_oss": Family(
        _gpt_oss,
        named(
            more={
                f"{_ATTN}.sinks": vector(f"{LAYER}.attn.sinks"),
                f"{_MLP}.router.weight": linear(f"{LAYER}.mlp.router.kernel"),
                f"{_MLP}.router.bias": vector(f"{LAYER}.mlp.router.bias"),
                f"{_MLP}.experts.gate_up_proj[#]": rows(f"{LAYER}.mlp.experts.gate_up"),
                f"{_MLP}.experts.gate_up_proj_bias[#]": vector(f"{LAYER}.mlp.experts.gate_up_bias"),
                f"{_MLP}.experts.down_proj[#]": rows(f"{LAYER}.mlp.experts.down"),
                f"{_MLP}.experts.down_proj_bias[#]": vector(f"{LAYER}.mlp.experts.down_bias"),
            }
        ),
    ),
}
