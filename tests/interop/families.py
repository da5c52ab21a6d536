"""Tiny configs of the families: each with the options that its config class has."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
HEADS = SIZES | {"head_dim": 8}
LIKE_QUERIES = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
FALCON = {key: value for key, value in LIKE_QUERIES.items() if key != "intermediate_size"}
IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
SPARSE = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
LATENT = ROUTED | {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
                   "n_shared_experts": 1}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0]}

BASE: dict[str, dict[str, Any]] = {
    "gemma": HEADS,
    "gemma2": HEADS | WINDOW,
    "gemma3_text": HEADS | WINDOW,
    "smollm3": SIZES | {"no_rope_layers": [1, 0]},
    "granite": SIZES | {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3,
                        "logits_scaling": 2.0},
    "granitemoe": SIZES | SPARSE,
    "olmo": SIZES,
    "olmo2": SIZES,
    "olmo3": SIZES | WINDOW,
    "exaone4": SIZES | WINDOW,
    "seed_oss": HEADS,
    "ernie4_5": HEADS,
    "internlm3": HEADS,
    "hunyuan_v1_dense": HEADS,
    "apertus": SIZES,
    "ministral3": HEADS,
    "starcoder2": SIZES,
    "glm4": HEADS,
    "cohere": SIZES,
    "cohere2": SIZES | WINDOW,
    "nemotron": HEADS,
    "stablelm": SIZES,
    "phi": SIZES,
    "falcon": FALCON,
    "gpt_neox": LIKE_QUERIES,
    "gptj": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4} | IDS,
    "opt": {"vocab_size": 96, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_position_embeddings": 64, "word_embed_proj_dim": 32, "pad_token_id": 1, "bos_token_id": None,
            "eos_token_id": None},
    "bloom": {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4} | IDS,
    "qwen2_moe": SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                          "shared_expert_intermediate_size": 24},
    "phimoe": SIZES | SPARSE,
    "glm4_moe": HEADS | ROUTED | {"n_group": 1, "topk_group": 1},
    "deepseek_v2": LIKE_QUERIES | LATENT,
    "deepseek_v3": LIKE_QUERIES | LATENT | {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1},
    "kimi_k2": LIKE_QUERIES | LATENT | {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1},
    "gpt_oss": HEADS | SPARSE | WINDOW,
    "llama": SIZES,
    "mistral": SIZES,
    "qwen2": SIZES,
    "qwen3": HEADS,
    "phi3": SIZES,
}  # fmt: skip
"""`model_type` -> the sizes of a tiny model."""
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "gemma": {"biases": {"attention_bias": True}, "untied": {"tie_word_embeddings": False}},
    "gemma2": {"no_caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None}, "caps": {
        "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 9}},
    "gemma3_text": {"linear": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e5,
                               "rope_local_base_freq": 50.0, "final_logit_softcapping": 4.0},
                    "every": {"sliding_window_pattern": 2, "layer_types": None}},
    "smollm3": {"window": {"use_sliding_window": True, "sliding_window": 5}, "biases": {
        "attention_bias": True, "mlp_bias": True}, "yarn": {"rope_scaling": YARN}},
    "granite": {"biases": {"attention_bias": True, "mlp_bias": True}},
    "granitemoe": {"multipliers": {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "logits_scaling": 2.0}},
    "olmo": {"clip": {"clip_qkv": 0.3}, "biases": {"attention_bias": True}},
    "olmo2": {"biases": {"attention_bias": True}},
    "olmo3": {"yarn": {"rope_scaling": YARN, "rope_theta": 1e5}},
    "exaone4": {"no_window": {"sliding_window": None, "layer_types": ["full_attention"] * 2}},
    "seed_oss": {"biases": {"attention_out_bias": True, "mlp_bias": True}, "none": {"attention_bias": False}},
    "ernie4_5": {"biases": {"use_bias": True}},
    "internlm3": {"biases": {"qkv_bias": True, "bias": True}, "dynamic": {
        "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}, "max_position_embeddings": 12}},
    "hunyuan_v1_dense": {"biases": {"attention_bias": True}},
    "apertus": {"biases": {"attention_bias": True}, "plain": {"rope_parameters": {"rope_type": "default"}}},
    "ministral3": {"beta": {"rope_parameters": YARN | {
        "rope_theta": 1e4, "llama_4_scaling_beta": 0.3, "beta_fast": 8.0, "mscale": 1.0, "mscale_all_dim": 0.5}}},
    "starcoder2": {"no_biases": {"use_bias": False, "sliding_window": 5}},
    "glm4": {"no_biases": {"attention_bias": False, "partial_rotary_factor": 1.0}},
    "cohere": {"norms": {"use_qk_norm": True}, "biases": {"attention_bias": True, "tie_word_embeddings": False}},
    "cohere2": {"every": {"sliding_window_pattern": 2, "layer_types": None, "attention_bias": True}},
    "nemotron": {"biases": {"attention_bias": True, "mlp_bias": True, "partial_rotary_factor": 1.0}},
    "stablelm": {"norms": {"qk_layernorm": True}, "parallel": {"use_parallel_residual": True, "use_qkv_bias": True}},
    "phi": {"norms": {"qk_layernorm": True}, "whole": {"partial_rotary_factor": 1.0}},
    "falcon": {"groups": {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
               "one_norm": {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
               "many_keys": {"multi_query": False, "parallel_attn": False, "bias": True},
               "alibi": {"alibi": True, "multi_query": False}},
    "gpt_neox": {"sequential": {"use_parallel_residual": False, "rotary_pct": 0.5, "rotary_emb_base": 100.0},
                 "no_biases": {"attention_bias": False}},
    "gptj": {"whole": {"rotary_dim": 8, "n_inner": 40}},
    "opt": {"after": {"do_layer_norm_before": False, "enable_bias": False}, "plain_norms": {
        "layer_norm_elementwise_affine": False}, "no_last_norm": {"_remove_final_layer_norm": True}},
    "bloom": {"six_heads": {"n_head": 6, "hidden_size": 36}},
    "qwen2_moe": {"some_dense": {"mlp_only_layers": [0], "norm_topk_prob": True, "qkv_bias": False},
                  "window": {"use_sliding_window": True, "sliding_window": 5, "decoder_sparse_step": 2}},
    "phimoe": {"biases": {"lm_head_bias": True, "attention_bias": True}, "longrope": {
        "rope_scaling": LONG | {"original_max_position_embeddings": 16, "short_mscale": 1.1, "long_mscale": 1.3}}},
    "glm4_moe": {"groups": {"use_qk_norm": True, "attention_bias": True, "n_routed_experts": 8, "n_group": 4,
                            "topk_group": 2, "routed_scaling_factor": 2.5}},
    "deepseek_v2": {"groups": {"topk_method": "group_limited_greedy", "n_routed_experts": 8, "n_group": 4,
                               "topk_group": 2, "q_lora_rank": None}, "biases": {"attention_bias": True}},
    "deepseek_v3": {"yarn": {"q_lora_rank": None, "rope_interleave": False, "rope_scaling": YARN | {
        "mscale": 1.0, "mscale_all_dim": 1.0}}, "wide_values": {"v_head_dim": 16, "norm_topk_prob": False}},
    "gpt_oss": {"plain_rope": {"rope_parameters": {"rope_type": "default"}}, "no_biases": {"attention_bias": False}},
    "llama": {"yarn": {"rope_scaling": YARN}, "dynamic": {
        "rope_scaling": {"type": "dynamic", "factor": 3.0}, "max_position_embeddings": 12}},
    "mistral": {"yarn": {"rope_scaling": YARN, "sliding_window": 5}},
    "qwen2": {"yarn": {"rope_scaling": YARN}},
    "qwen3": {"yarn": {"rope_parameters": YARN | {"truncate": False, "attention_factor": 1.5}}},
    "phi3": {"longrope": {"rope_scaling": LONG, "original_max_position_embeddings": 16},
             "short_rows": {"rope_scaling": LONG, "original_max_position_embeddings": 40},
             "partial": {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 16, "rope_scaling": {
                 "rope_type": "longrope", "short_factor": [1.0, 1.2], "long_factor": [2.0, 3.0]}}},
}  # fmt: skip
"""`model_type` -> name -> options beside the sizes. Those of meshpar's own decoders have no case of sizes alone."""
OWN = ("llama", "mistral", "qwen2", "qwen3", "phi3")
CASES: dict[str, dict[str, Any]] = {
    **{kind: {"model_type": kind} | sizes for kind, sizes in BASE.items() if kind not in OWN},
    **{
        f"{kind}-{name}": {"model_type": kind} | BASE[kind] | more
        for kind, found in OPTIONS.items()
        for name, more in found.items()
    },
}
"""Name -> a `config.json`."""

PUBLISHED: dict[str, str] = {
    "Llama-2-7B": "llama", "Llama-3.1-8B": "llama", "Llama-4": "llama4_text", "Mistral-7B": "mistral",
    "Ministral-8B": "ministral", "Mistral-Small-3.1": "mistral3", "Mixtral-8x7B": "mixtral", "Qwen2.5-7B": "qwen2",
    "Qwen2.5-1M (YaRN)": "qwen2-yarn", "Qwen1.5-MoE": "qwen2_moe", "Qwen3-8B": "qwen3", "Qwen3-30B-A3B": "qwen3_moe",
    "Qwen3-Next": "qwen3_next", "Qwen3.5": "qwen3_5_text", "Gemma-1": "gemma", "Gemma-2": "gemma2",
    "Gemma-3 text": "gemma3_text", "Gemma-4": "gemma4_text", "Phi-2": "phi", "Phi-3-mini-4k": "phi3",
    "Phi-3-mini-128k / Phi-3.5": "phi3-longrope", "Phi-4-14B": "phi3", "Phi-4-mini": "phi3-partial",
    "PhiMoE": "phimoe-longrope", "OLMo-1": "olmo", "OLMo-2": "olmo2", "OLMo-3": "olmo3-yarn", "OLMoE": "olmoe",
    "DeepSeek-V2": "deepseek_v2-groups", "DeepSeek-V3/R1": "deepseek_v3", "DeepSeek-R1-Distill-Llama": "llama",
    "gpt-oss": "gpt_oss", "SmolLM2": "llama", "SmolLM3": "smollm3", "Granite-3": "granite",
    "Granite-MoE": "granitemoe", "Falcon-7B": "falcon", "Falcon-H1": "falcon_h1", "GPT-NeoX / Pythia": "gpt_neox",
    "GPT-J": "gptj", "GPT-2": "gpt2", "OPT": "opt", "BLOOM": "bloom", "StarCoder2": "starcoder2", "GLM-4": "glm4",
    "GLM-4.5 MoE": "glm4_moe", "Command-R": "cohere", "Command-R7B": "cohere2", "Nemotron-4 / Minitron": "nemotron",
    "Nemotron-H": "nemotron_h", "StableLM": "stablelm", "InternLM3": "internlm3", "Kimi-K2": "kimi_k2",
    "EXAONE-4": "exaone4", "Yi": "llama", "TinyLlama": "llama", "Mamba2": "mamba2", "Seed-OSS": "seed_oss",
    "ERNIE 4.5": "ernie4_5", "MiniMax": "minimax", "Hunyuan": "hunyuan_v1_dense", "Apertus": "apertus",
}  # fmt: skip
"""62 published variants -> the case that stands for it, or its `model_type`."""
