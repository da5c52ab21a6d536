"""Keys and defaults of the config classes of transformers. `scripts/config_classes.py` writes the tables.

`rope_theta` is the base of the rotary frequencies if `rope_parameters` has none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple


class ConfigClass(NamedTuple):
    """A config class.

    Args:
      defaults: key -> the value of a missing key.
      nullable: the keys with an effect that may be null.
      aliases: another name of a key -> the key.
      beside: keys that the class does not list, and transformers reads if a config has them.
    """

    called: str
    defaults: Mapping[str, Any]
    nullable: frozenset[str]
    aliases: Mapping[str, str]
    beside: frozenset[str]


def _of(
    called: str, own: Mapping[str, Any], without: Collection[str] = (), nullable: Collection[str] = (),
    aliases: Mapping[str, str] | None = None, beside: Collection[str] = (),
) -> ConfigClass:  # fmt: skip
    """A class by what differs from `USUAL`. A key whose default is null may be null, as may those of `nullable`."""
    defaults = {**{key: value for key, value in USUAL.items() if key not in without}, **own}
    rotary = {"partial_rotary_factor", "rope_scaling"} if "rope_theta" in defaults else set[str]()
    nulls = {key for key, value in defaults.items() if value is None}
    others = {"per_layer_config", "quantization_config", *rotary, *beside}
    return ConfigClass(called, defaults, frozenset(nulls.union(nullable)), aliases or {}, frozenset(others))


# fmt: off
USUAL: Mapping[str, Any] = {"transformers_version": None, "architectures": None, "output_hidden_states": False,
    "return_dict": True, "dtype": None, "chunk_size_feed_forward": 0, "is_encoder_decoder": False, "id2label": None,
    "label2id": None, "problem_type": None, "initializer_range": 0.02, "use_cache": True, "attention_dropout": 0.0,
    "rope_parameters": None, "tie_word_embeddings": False, "hidden_act": "silu", "rope_theta": 10000.0,
    "pad_token_id": None, "attention_bias": False, "num_attention_heads": 32, "hidden_size": 4096,
    "num_hidden_layers": 32, "eos_token_id": 2}
"""The defaults that many classes have."""
CONFIG_CLASSES: Mapping[str, ConfigClass] = {
    "llama": _of("LlamaConfig", {"vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": None,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-06, "bos_token_id": 1, "pretraining_tp": 1, "mlp_bias":
        False, "head_dim": None}),
    "mistral": _of("MistralConfig", {"vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8,
        "head_dim": None, "max_position_embeddings": 131072, "rms_norm_eps": 1e-06, "bos_token_id": 1,
        "sliding_window": 4096}, without=["attention_bias"], nullable=["sliding_window"]),
    "ministral": _of("MinistralConfig", {"vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8,
        "head_dim": None, "max_position_embeddings": 131072, "rms_norm_eps": 1e-06, "bos_token_id": 1,
        "sliding_window": 4096, "layer_types": None}, without=["attention_bias"], nullable=["sliding_window"]),
    "qwen2": _of("Qwen2Config", {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "use_sliding_window": False, "sliding_window": 4096,
        "max_window_layers": 28, "layer_types": None, "bos_token_id": None, "eos_token_id": None},
        without=["attention_bias"], nullable=["num_key_value_heads", "sliding_window"], beside=["head_dim"]),
    "qwen3": _of("Qwen3Config", {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
        "head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "use_sliding_window": False,
        "sliding_window": 4096, "max_window_layers": 28, "layer_types": None, "bos_token_id": None, "eos_token_id":
        None}, nullable=["num_key_value_heads", "sliding_window"]),
    "phi3": _of("Phi3Config", {"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
        "num_key_value_heads": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "bos_token_id": 1, "eos_token_id": 32000,
        "pad_token_id": 32000, "sliding_window": None}, without=["attention_bias"], beside=["head_dim"]),
    "mixtral": _of("MixtralConfig", {"vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8,
        "head_dim": None, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "bos_token_id": 1,
        "sliding_window": None, "num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False,
        "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "rope_theta": 1000000.0},
        without=["attention_bias"], aliases={"num_experts": "num_local_experts"}),
    "qwen3_moe": _of("Qwen3MoeConfig", {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 24, "num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-06,
        "use_sliding_window": False, "sliding_window": 4096, "decoder_sparse_step": 1, "moe_intermediate_size": 768,
        "num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": False, "output_router_logits": False,
        "router_aux_loss_coef": 0.001, "mlp_only_layers": None, "bos_token_id": None, "eos_token_id": None},
        nullable=["sliding_window"], aliases={"num_experts": "num_local_experts"}, beside=["head_dim"]),
    "olmoe": _of("OlmoeConfig", {"vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048,
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": None, "max_position_embeddings":
        4096, "rms_norm_eps": 1e-05, "pad_token_id": 1, "bos_token_id": None, "eos_token_id": 50279, "clip_qkv": None,
        "num_experts_per_tok": 8, "num_experts": 64, "output_router_logits": False, "router_aux_loss_coef": 0.01,
        "norm_topk_prob": False}, aliases={"num_local_experts": "num_experts"}, beside=["head_dim",
        "sliding_window"]),
    "gpt2": _of("GPT2Config", {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
        "n_inner": None, "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-05, "summary_type": "cls_index", "summary_use_proj": True, "summary_activation":
        None, "summary_proj_to_labels": True, "summary_first_dropout": 0.1, "scale_attn_weights": True,
        "bos_token_id": 50256, "eos_token_id": 50256, "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False, "add_cross_attention": False, "tie_word_embeddings": True},
        without=["attention_dropout", "rope_parameters", "hidden_act", "rope_theta", "attention_bias",
        "num_attention_heads", "hidden_size", "num_hidden_layers"], aliases={"hidden_size": "n_embd",
        "max_position_embeddings": "n_positions", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}),
    "seed_oss": _of("SeedOssConfig", {"vocab_size": 155136, "intermediate_size": 27648, "num_hidden_layers": 64,
        "num_attention_heads": 80, "num_key_value_heads": 8, "max_position_embeddings": 524288, "rms_norm_eps": 1e-06,
        "pad_token_id": 1, "bos_token_id": 0, "pretraining_tp": 1, "attention_bias": True, "attention_out_bias":
        False, "attention_dropout": 0.1, "residual_dropout": 0.1, "mlp_bias": False, "head_dim": 128},
        nullable=["head_dim", "num_key_value_heads"]),
    "ernie4_5": _of("Ernie4_5Config", {"vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings":
        131072, "rms_norm_eps": 1e-05, "pad_token_id": 0, "bos_token_id": 1, "tie_word_embeddings": True, "use_bias":
        False, "head_dim": 128, "rope_theta": 500000.0}, without=["attention_dropout", "attention_bias"],
        nullable=["head_dim", "num_key_value_heads", "use_bias"]),
    "internlm3": _of("InternLM3Config", {"vocab_size": 128512, "intermediate_size": 10240, "num_hidden_layers": 48,
        "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-05, "pad_token_id": 2,
        "bos_token_id": 1, "mlp_bias": False, "head_dim": 128}, nullable=["head_dim", "num_key_value_heads"],
        aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"}),
    "hunyuan_v1_dense": _of("HunYuanDenseV1Config", {"vocab_size": 290943, "intermediate_size": 11008,
        "num_key_value_heads": None, "max_position_embeddings": 2048, "rms_norm_eps": 1e-05, "pad_token_id": 0,
        "bos_token_id": 1, "eod_token_id": 3, "pretraining_tp": 1, "head_dim": None}, nullable=["eod_token_id"]),
    "smollm3": _of("SmolLM3Config", {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008,
        "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings":
        32768, "rms_norm_eps": 1e-06, "pad_token_id": 128004, "bos_token_id": 128000, "eos_token_id": 128001,
        "use_sliding_window": False, "sliding_window": None, "no_rope_layers": None, "no_rope_layer_interval": 4,
        "layer_types": None, "mlp_bias": False, "tie_word_embeddings": True, "rope_theta": 2000000.0},
        nullable=["num_key_value_heads"], beside=["head_dim"]),
    "apertus": _of("ApertusConfig", {"vocab_size": 131072, "intermediate_size": 14336, "num_key_value_heads": None,
        "hidden_act": "xielu", "max_position_embeddings": 65536, "rms_norm_eps": 1e-05, "pad_token_id": 3,
        "bos_token_id": 1, "rope_theta": 12000000.0}, beside=["head_dim"]),
    "gemma": _of("GemmaConfig", {"vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "hidden_act":
        "gelu_pytorch_tanh", "max_position_embeddings": 8192, "rms_norm_eps": 1e-06, "pad_token_id": 0,
        "eos_token_id": 1, "bos_token_id": 2, "tie_word_embeddings": True, "use_bidirectional_attention": None}),
    "gemma2": _of("Gemma2Config", {"vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "rms_norm_eps": 1e-06,
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "tie_word_embeddings": True, "query_pre_attn_scalar":
        256, "sliding_window": 4096, "layer_types": None, "final_logit_softcapping": 30.0, "attn_logit_softcapping":
        50.0, "use_bidirectional_attention": None}, without=["hidden_act"], nullable=["attn_logit_softcapping",
        "final_logit_softcapping", "sliding_window"]),
    "gemma3_text": _of("Gemma3TextConfig", {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "rms_norm_eps": 1e-06,
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "tie_word_embeddings": True, "query_pre_attn_scalar":
        256, "sliding_window": 4096, "layer_types": None, "final_logit_softcapping": None, "attn_logit_softcapping":
        None, "use_bidirectional_attention": False, "rope_theta": {"global": 1000000.0, "local": 10000.0}},
        without=["hidden_act"], nullable=["sliding_window", "use_bidirectional_attention"],
        beside=["rope_local_base_freq", "sliding_window_pattern"]),
    "granite": _of("GraniteConfig", {"vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": None,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-06, "bos_token_id": 1, "mlp_bias": False,
        "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0},
        beside=["head_dim"]),
    "granitemoe": _of("GraniteMoeConfig", {"vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads":
        None, "max_position_embeddings": 2048, "rms_norm_eps": 1e-06, "bos_token_id": 1, "embedding_multiplier": 1.0,
        "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0, "num_local_experts": 8,
        "num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.001},
        nullable=["attention_multiplier", "embedding_multiplier", "logits_scaling", "num_experts_per_tok",
        "num_local_experts", "residual_multiplier"], beside=["head_dim"]),
    "olmo": _of("OlmoConfig", {"vocab_size": 50304, "intermediate_size": 11008, "num_key_value_heads": None,
        "max_position_embeddings": 2048, "pad_token_id": 1, "bos_token_id": None, "eos_token_id": 50279, "clip_qkv":
        None}, beside=["head_dim"]),
    "olmo2": _of("Olmo2Config", {"vocab_size": 50304, "intermediate_size": 11008, "num_key_value_heads": None,
        "max_position_embeddings": 2048, "pad_token_id": 1, "bos_token_id": None, "eos_token_id": 50279,
        "rms_norm_eps": 1e-05}, beside=["head_dim"]),
    "olmo3": _of("Olmo3Config", {"vocab_size": 50304, "intermediate_size": 11008, "num_key_value_heads": None,
        "max_position_embeddings": 2048, "pad_token_id": 1, "bos_token_id": None, "eos_token_id": 50279,
        "rms_norm_eps": 1e-05, "sliding_window": 4096, "layer_types": None, "rope_theta": 500000.0},
        nullable=["sliding_window"], beside=["head_dim"]),
    "exaone4": _of("Exaone4Config", {"vocab_size": 102400, "intermediate_size": 16384, "num_key_value_heads": 32,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-05, "bos_token_id": 0, "sliding_window": 4096,
        "sliding_window_pattern": 4, "layer_types": None}, without=["attention_bias"], nullable=["sliding_window",
        "sliding_window_pattern"], beside=["head_dim"]),
    "starcoder2": _of("Starcoder2Config", {"vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288,
        "num_hidden_layers": 30, "num_attention_heads": 24, "num_key_value_heads": 2, "hidden_act":
        "gelu_pytorch_tanh", "max_position_embeddings": 4096, "initializer_range": 0.018042, "norm_epsilon": 1e-05,
        "bos_token_id": 50256, "eos_token_id": 50256, "sliding_window": None, "residual_dropout": 0.0,
        "embedding_dropout": 0.0, "use_bias": True, "tie_word_embeddings": True}, without=["attention_bias"],
        beside=["head_dim"]),
    "nemotron": _of("NemotronConfig", {"vocab_size": 256000, "hidden_size": 6144, "intermediate_size": 24576,
        "num_attention_heads": 48, "head_dim": None, "num_key_value_heads": None, "hidden_act": "relu2",
        "max_position_embeddings": 4096, "initializer_range": 0.0134, "norm_eps": 1e-05, "bos_token_id": 2,
        "eos_token_id": 3, "mlp_bias": False}),
    "stablelm": _of("StableLmConfig", {"vocab_size": 50304, "intermediate_size": 6912, "hidden_size": 2560,
        "num_key_value_heads": 32, "max_position_embeddings": 4096, "layer_norm_eps": 1e-05, "use_qkv_bias": False,
        "qk_layernorm": False, "use_parallel_residual": False, "hidden_dropout": 0.0, "bos_token_id": 0,
        "eos_token_id": 0}, without=["attention_bias"], beside=["head_dim"]),
    "phi": _of("PhiConfig", {"vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers":
        24, "num_key_value_heads": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "hidden_act": "gelu_new",
        "max_position_embeddings": 2048, "layer_norm_eps": 1e-05, "qk_layernorm": False, "bos_token_id": 1},
        without=["attention_bias"], beside=["head_dim"]),
    "cohere": _of("CohereConfig", {"vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528,
        "logit_scale": 0.0625, "num_hidden_layers": 40, "num_attention_heads": 64, "num_key_value_heads": None,
        "max_position_embeddings": 8192, "layer_norm_eps": 1e-05, "pad_token_id": 0, "bos_token_id": 5,
        "eos_token_id": 255001, "tie_word_embeddings": True, "use_qk_norm": False, "rope_theta": 500000.0},
        nullable=["layer_norm_eps", "logit_scale", "use_qk_norm"], beside=["head_dim"]),
    "cohere2": _of("Cohere2Config", {"vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528,
        "logit_scale": 0.0625, "num_hidden_layers": 40, "num_attention_heads": 64, "num_key_value_heads": None,
        "max_position_embeddings": 8192, "layer_norm_eps": 1e-05, "pad_token_id": 0, "bos_token_id": 5,
        "eos_token_id": 255001, "tie_word_embeddings": True, "sliding_window": 4096, "layer_types": None},
        nullable=["sliding_window"], beside=["head_dim", "sliding_window_pattern"]),
    "glm4": _of("Glm4Config", {"vocab_size": 151552, "intermediate_size": 13696, "num_hidden_layers": 40,
        "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-07,
        "pad_token_id": 151329, "eos_token_id": None, "bos_token_id": None, "attention_bias": True}),
    "gpt_neox": _of("GPTNeoXConfig", {"vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44,
        "num_attention_heads": 64, "intermediate_size": 24576, "hidden_act": "gelu", "hidden_dropout": 0.0,
        "classifier_dropout": 0.1, "max_position_embeddings": 2048, "layer_norm_eps": 1e-05, "bos_token_id": 0,
        "use_parallel_residual": True, "attention_bias": True, "is_decoder": False}, beside=["head_dim",
        "rotary_emb_base", "rotary_pct"]),
    "gptj": _of("GPTJConfig", {"vocab_size": 50400, "n_positions": 2048, "n_embd": 4096, "n_layer": 28, "n_head": 16,
        "rotary_dim": 64, "n_inner": None, "activation_function": "gelu_new", "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0, "layer_norm_epsilon": 1e-05, "bos_token_id": 50256, "eos_token_id": 50256},
        without=["attention_dropout", "rope_parameters", "hidden_act", "rope_theta", "attention_bias",
        "num_attention_heads", "hidden_size", "num_hidden_layers"], aliases={"max_position_embeddings": "n_positions",
        "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}),
    "falcon": _of("FalconConfig", {"vocab_size": 65024, "hidden_size": 4544, "num_attention_heads": 71,
        "num_ln_in_parallel_attn": None, "layer_norm_epsilon": 1e-05, "hidden_dropout": 0.0, "num_kv_heads": None,
        "alibi": False, "new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "bias": False,
        "max_position_embeddings": 2048, "bos_token_id": 11, "eos_token_id": 11, "ffn_hidden_size": None,
        "activation": "gelu", "tie_word_embeddings": True}, without=["hidden_act", "attention_bias"],
        nullable=["activation", "alibi", "bias", "hidden_dropout", "layer_norm_epsilon", "multi_query",
        "new_decoder_architecture", "parallel_attn"], beside=["classifier_dropout", "head_dim", "n_embed"]),
    "opt": _of("OPTConfig", {"vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072,
        "max_position_embeddings": 2048, "do_layer_norm_before": True, "_remove_final_layer_norm": False,
        "word_embed_proj_dim": None, "dropout": 0.1, "num_attention_heads": 12, "activation_function": "relu",
        "layerdrop": 0.0, "init_std": 0.02, "pad_token_id": 1, "bos_token_id": 2, "enable_bias": True,
        "layer_norm_elementwise_affine": True, "tie_word_embeddings": True}, without=["initializer_range",
        "rope_parameters", "hidden_act", "rope_theta", "attention_bias"]),
    "bloom": _of("BloomConfig", {"vocab_size": 250880, "hidden_size": 64, "n_layer": 2, "n_head": 8,
        "layer_norm_epsilon": 1e-05, "bos_token_id": 1, "apply_residual_connection_post_layernorm": False,
        "hidden_dropout": 0.0, "pretraining_tp": 1, "slow_but_exact": False, "tie_word_embeddings": True},
        without=["rope_parameters", "hidden_act", "rope_theta", "attention_bias", "num_attention_heads",
        "num_hidden_layers"], aliases={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
        beside=["n_embed"]),
    "qwen2_moe": _of("Qwen2MoeConfig", {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings":
        32768, "rms_norm_eps": 1e-06, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
        "decoder_sparse_step": 1, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": False, "output_router_logits": False,
        "router_aux_loss_coef": 0.001, "mlp_only_layers": None, "qkv_bias": True, "layer_types": None, "bos_token_id":
        None, "eos_token_id": None}, without=["attention_bias"], nullable=["num_key_value_heads", "sliding_window"],
        beside=["head_dim"]),
    "phimoe": _of("PhimoeConfig", {"vocab_size": 32064, "intermediate_size": 6400, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "bos_token_id": 1, "sliding_window": None,
        "num_experts_per_tok": 2, "num_local_experts": 16, "output_router_logits": False, "router_aux_loss_coef":
        0.001, "router_jitter_noise": 0.01, "input_jitter_noise": 0.0, "lm_head_bias": False, "rope_theta":
        1000000.0}, beside=["head_dim"]),
    "glm4_moe": _of("Glm4MoeConfig", {"vocab_size": 151552, "intermediate_size": 10944, "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
        "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "output_router_logits": False, "n_shared_experts": 1,
        "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace":
        1, "norm_topk_prob": True, "use_qk_norm": False, "bos_token_id": None, "eos_token_id": None, "num_mtp_layers":
        1}, aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
        beside=["head_dim"]),
    "deepseek_v2": _of("DeepseekV2Config", {"vocab_size": 102400, "intermediate_size": 11008, "num_key_value_heads":
        None, "max_position_embeddings": 2048, "rms_norm_eps": 1e-06, "bos_token_id": 1, "pretraining_tp": 1,
        "mlp_bias": False, "head_dim": None, "first_k_dense_replace": 0, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "n_group": None, "n_routed_experts": 64, "output_router_logits": False, "n_shared_experts": 2,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "routed_scaling_factor": 1.0, "topk_group": None,
        "topk_method": "greedy", "norm_topk_prob": False, "v_head_dim": 128, "num_experts_per_tok": None,
        "moe_intermediate_size": 1407}, nullable=["norm_topk_prob", "q_lora_rank", "topk_method"],
        aliases={"num_experts": "n_routed_experts"}),
    "deepseek_v3": _of("DeepseekV3Config", {"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads":
        128, "n_shared_experts": 1, "n_routed_experts": 256, "output_router_logits": False, "routed_scaling_factor":
        2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim":
        128, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob":
        True, "max_position_embeddings": 4096, "rms_norm_eps": 1e-06, "bos_token_id": 0, "eos_token_id": 1,
        "pretraining_tp": 1, "rope_interleave": True, "num_mtp_layers": 1}, nullable=["first_k_dense_replace",
        "n_group", "norm_topk_prob", "num_experts_per_tok", "num_key_value_heads", "q_lora_rank", "rope_interleave",
        "topk_group", "v_head_dim"], aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers":
        "num_nextn_predict_layers"}, beside=["head_dim"]),
    "gpt_oss": _of("GptOssConfig", {"num_hidden_layers": 36, "num_local_experts": 128, "vocab_size": 201088,
        "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64, "num_attention_heads": 64,
        "num_key_value_heads": 8, "sliding_window": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
        "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "router_aux_loss_coef": 0.001,
        "output_router_logits": False, "layer_types": None, "bos_token_id": None, "eos_token_id": None,
        "attention_bias": True, "rope_theta": 150000.0}, nullable=["sliding_window"], aliases={"num_experts":
        "num_local_experts"}),
    "ministral3": _of("Ministral3Config", {"vocab_size": 131072, "intermediate_size": 14336, "num_hidden_layers": 34,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-05,
        "pad_token_id": 11, "bos_token_id": 1, "sliding_window": None}, without=["attention_bias"]),
    "bert": _of("BertConfig", {"vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "intermediate_size": 3072, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1, "max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps":
        1e-12, "pad_token_id": 0, "classifier_dropout": None, "is_decoder": False, "add_cross_attention": False,
        "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": True}, without=["attention_dropout",
        "rope_parameters", "rope_theta", "attention_bias"]),
    "roberta": _of("RobertaConfig", {"vocab_size": 50265, "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "intermediate_size": 3072, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1, "max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps":
        1e-12, "pad_token_id": 1, "bos_token_id": 0, "classifier_dropout": None, "is_decoder": False,
        "add_cross_attention": False, "tie_word_embeddings": True}, without=["attention_dropout", "rope_parameters",
        "rope_theta", "attention_bias"]),
    "modernbert": _of("ModernBertConfig", {"vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152,
        "num_hidden_layers": 22, "num_attention_heads": 12, "hidden_activation": "gelu", "max_position_embeddings":
        8192, "initializer_cutoff_factor": 2.0, "norm_eps": 1e-05, "norm_bias": False, "pad_token_id": 50283,
        "eos_token_id": 50282, "bos_token_id": 50281, "cls_token_id": 50281, "sep_token_id": 50282, "layer_types":
        None, "local_attention": 128, "embedding_dropout": 0.0, "mlp_bias": False, "mlp_dropout": 0.0, "decoder_bias":
        True, "classifier_pooling": "cls", "classifier_dropout": 0.0, "classifier_bias": False,
        "classifier_activation": "gelu", "deterministic_flash_attn": False, "sparse_prediction": False,
        "sparse_pred_ignore_index": -100, "tie_word_embeddings": True, "rope_theta": {"global": 160000.0, "local":
        10000.0}}, without=["use_cache", "hidden_act"], nullable=["cls_token_id", "sep_token_id"],
        beside=["global_attn_every_n_layers", "global_rope_theta", "head_dim", "local_rope_theta"]),
    "vit": _of("ViTConfig", {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob":
        0.0, "layer_norm_eps": 1e-12, "image_size": 224, "patch_size": 16, "num_channels": 3, "qkv_bias": True,
        "encoder_stride": 16, "pooler_output_size": None, "pooler_act": "tanh"}, without=["use_cache",
        "attention_dropout", "rope_parameters", "tie_word_embeddings", "rope_theta", "pad_token_id", "attention_bias",
        "eos_token_id"], beside=["head_dim"]),
    "clip": _of("CLIPConfig", {"text_config": None, "vision_config": None, "projection_dim": 512,
        "logit_scale_init_value": 2.6592, "initializer_factor": 1.0}, without=["initializer_range", "use_cache",
        "attention_dropout", "rope_parameters", "tie_word_embeddings", "hidden_act", "rope_theta", "pad_token_id",
        "attention_bias", "num_attention_heads", "hidden_size", "num_hidden_layers", "eos_token_id"],
        nullable=["initializer_factor", "logit_scale_init_value", "projection_dim"], beside=["text_config_dict",
        "vision_config_dict"]),
    "clip_text_model": _of("CLIPTextConfig", {"vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048,
        "projection_dim": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "max_position_embeddings": 77,
        "hidden_act": "quick_gelu", "layer_norm_eps": 1e-05, "initializer_factor": 1.0, "pad_token_id": 1,
        "bos_token_id": 49406, "eos_token_id": 49407}, without=["use_cache", "rope_parameters", "tie_word_embeddings",
        "rope_theta", "attention_bias"], nullable=["initializer_factor", "layer_norm_eps", "projection_dim"]),
    "clip_vision_model": _of("CLIPVisionConfig", {"hidden_size": 768, "intermediate_size": 3072, "projection_dim":
        512, "num_hidden_layers": 12, "num_attention_heads": 12, "num_channels": 3, "image_size": 224, "patch_size":
        32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-05, "initializer_factor": 1.0}, without=["use_cache",
        "rope_parameters", "tie_word_embeddings", "rope_theta", "pad_token_id", "attention_bias", "eos_token_id"],
        nullable=["image_size", "patch_size"]),
}
