"""Keys and defaults of the config classes of transformers. `scripts/config_classes.py` writes this file.

`rope_theta` is the base of the rotary frequencies if `rope_parameters` has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class ConfigClass(NamedTuple):
    """A config class.

    Args:
      defaults: key -> the value of a missing key, in the order of the class.
      nullable: the keys that may be null.
      aliases: another name of a key -> the key.
      beside: keys that the class does not list, and transformers reads if a config has them.
    """

    called: str
    defaults: Mapping[str, Any]
    nullable: frozenset[str]
    aliases: Mapping[str, str]
    beside: frozenset[str]


# fmt: off
CONFIG_CLASSES: Mapping[str, ConfigClass] = {
    "llama": ConfigClass(
        "LlamaConfig",
        {"transformers_version": None, "architectures": None, "output_hidden_states": False, "return_dict": True,
         "dtype": None, "chunk_size_feed_forward": 0, "is_encoder_decoder": False, "id2label": None, "label2id": None,
         "problem_type": None, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None, "hidden_act": "silu",
         "max_position_embeddings": 2048, "initializer_range": 0.02, "rms_norm_eps": 1e-06, "use_cache": True,
         "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "pretraining_tp": 1, "tie_word_embeddings":
         False, "rope_parameters": None, "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False,
         "head_dim": None, "rope_theta": 10000.0},
        frozenset(["attention_dropout", "bos_token_id", "eos_token_id", "head_dim", "num_key_value_heads",
         "pad_token_id", "pretraining_tp", "rope_parameters"]),
        {},
        frozenset(["partial_rotary_factor", "per_layer_config", "quantization_config", "rope_scaling"]),
    ),
    "mistral": ConfigClass(
        "MistralConfig",
        {"transformers_version": None, "architectures": None, "output_hidden_states": False, "return_dict": True,
         "dtype": None, "chunk_size_feed_forward": 0, "is_encoder_decoder": False, "id2label": None, "label2id": None,
         "problem_type": None, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None, "hidden_act":
         "silu", "max_position_embeddings": 131072, "initializer_range": 0.02, "rms_norm_eps": 1e-06, "use_cache":
         True, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
         "rope_parameters": None, "sliding_window": 4096, "attention_dropout": 0.0, "rope_theta": 10000.0},
        frozenset(["bos_token_id", "eos_token_id", "head_dim", "pad_token_id", "rope_parameters", "sliding_window"]),
        {},
        frozenset(["partial_rotary_factor", "per_layer_config", "quantization_config", "rope_scaling"]),
    ),
    "ministral": ConfigClass(
        "MinistralConfig",
        {"transformers_version": None, "architectures": None, "output_hidden_states": False, "return_dict": True,
         "dtype": None, "chunk_size_feed_forward": 0, "is_encoder_decoder": False, "id2label": None, "label2id": None,
         "problem_type": None, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None, "hidden_act":
         "silu", "max_position_embeddings": 131072, "initializer_range": 0.02, "rms_norm_eps": 1e-06, "use_cache":
         True, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
         "rope_parameters": None, "sliding_window": 4096, "attention_dropout": 0.0, "layer_types": None, "rope_theta":
         10000.0},
        frozenset(["bos_token_id", "eos_token_id", "head_dim", "layer_types", "pad_token_id", "rope_parameters",
         "sliding_window"]),
        {},
        frozenset(["partial_rotary_factor", "per_layer_config", "quantization_config", "rope_scaling"]),
    ),
    "qwen2": ConfigClass(
        "Qwen2Config",
        {"transformers_version": None, "architectures": None, "output_hidden_states": False, "return_dict": True,
         "dtype": None, "chunk_size_feed_forward": 0, "is_encoder_decoder": False, "id2label": None, "label2id": None,
         "problem_type": None, "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu",
         "max_position_embeddings": 32768, "initializer_range": 0.02, "rms_norm_eps": 1e-06, "use_cache": True,
         "tie_word_embeddings": False, "rope_parameters": None, "use_sliding_window": False, "sliding_window": 4096,
         "max_window_layers": 28, "layer_types": None, "attention_dropout": 0.0, "pad_token_id": None, "bos_token_id":
         None, "eos_token_id": None, "rope_theta": 10000.0},
        frozenset(["bos_token_id", "eos_token_id", "layer_types", "num_key_value_heads", "pad_token_id",
         "rope_parameters", "sliding_window"]),
        {},
        frozenset(["head_dim", "partial_rotary_factor", "per_layer_config", "quantization_config", "rope_scaling"]),
    ),
    "qwen3": ConfigClass(
        "Qwen3Config",
        {"transformers_version": None, "architectures": None, "output_hidden_states": False, "return_dict": True,
         "dtype": None, "chunk_size_feed_forward": 0, "is_encoder_decoder": False, "id2label": None, "label2id": None,
         "problem_type": None, "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "hidden_act":
         "silu", "max_position_embeddings": 32768, "initializer_range": 0.02, "rms_norm_eps": 1e-06, "use_cache":
         True, "tie_word_embeddings": False, "rope_parameters": None, "attention_bias": False, "use_sliding_window":
         False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None, "attention_dropout": 0.0,
         "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "rope_theta": 10000.0},
        frozenset(["bos_token_id", "eos_token_id", "layer_types", "num_key_value_heads", "pad_token_id",
         "rope_parameters", "sliding_window"]),
        {},
        frozenset(["partial_rotary_factor", "per_layer_config", "quantization_config", "rope_scaling"]),
    ),
    "phi3": ConfigClass(
        "Phi3Config",
        {"transformers_version": None, "architectures": None, "output_hidden_states": False, "return_dict": True,
         "dtype": None, "chunk_size_feed_forward": 0, "is_encoder_decoder": False, "id2label": None, "label2id": None,
         "problem_type": None, "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None, "resid_pdrop": 0.0,
         "embd_pdrop": 0.0, "attention_dropout": 0.0, "hidden_act": "silu", "max_position_embeddings": 4096,
         "original_max_position_embeddings": 4096, "initializer_range": 0.02, "rms_norm_eps": 1e-05, "use_cache":
         True, "tie_word_embeddings": False, "rope_parameters": None, "bos_token_id": 1, "eos_token_id": 32000,
         "pad_token_id": 32000, "sliding_window": None, "rope_theta": 10000.0},
        frozenset(["bos_token_id", "eos_token_id", "num_key_value_heads", "pad_token_id", "rope_parameters",
         "sliding_window"]),
        {},
        frozenset(["head_dim", "partial_rotary_factor", "per_layer_config", "quantization_config", "rope_scaling"]),
    ),
    "mixtral": ConfigClass(
        "MixtralConfig",
        {"transformers_version": None, "architectures": None, "output_hidden_states": False, "return_dict": True,
         "dtype": None, "chunk_size_feed_forward": 0, "is_encoder_decoder": False, "id2label": None, "label2id": None,
         "problem_type": None, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None, "hidden_act":
         "silu", "max_position_embeddings": 131072, "initializer_range": 0.02, "rms_norm_eps": 1e-05, "use_cache":
         True, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
         "sliding_window": None, "attention_dropout": 0.0, "num_experts_per_tok": 2, "num_local_experts": 8,
         "output_router_logits": False, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "rope_parameters":
         None, "rope_theta": 1000000.0},
        frozenset(["bos_token_id", "eos_token_id", "head_dim", "pad_token_id", "rope_parameters", "sliding_window"]),
        {"num_experts": "num_local_experts"},
        frozenset(["partial_rotary_factor", "per_layer_config", "quantization_config", "rope_scaling"]),
    ),
    "qwen3_moe": ConfigClass(
        "Qwen3MoeConfig",
        {"transformers_version": None, "architectures": None, "output_hidden_states": False, "return_dict": True,
         "dtype": None, "chunk_size_feed_forward": 0, "is_encoder_decoder": False, "id2label": None, "label2id": None,
         "problem_type": None, "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
         "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4, "hidden_act": "silu",
         "max_position_embeddings": 32768, "initializer_range": 0.02, "rms_norm_eps": 1e-06, "use_cache": True,
         "tie_word_embeddings": False, "rope_parameters": None, "attention_bias": False, "use_sliding_window": False,
         "sliding_window": 4096, "attention_dropout": 0.0, "decoder_sparse_step": 1, "moe_intermediate_size": 768,
         "num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": False, "output_router_logits": False,
         "router_aux_loss_coef": 0.001, "mlp_only_layers": None, "pad_token_id": None, "bos_token_id": None,
         "eos_token_id": None, "rope_theta": 10000.0},
        frozenset(["bos_token_id", "eos_token_id", "mlp_only_layers", "pad_token_id", "rope_parameters",
         "sliding_window"]),
        {"num_experts": "num_local_experts"},
        frozenset(["head_dim", "partial_rotary_factor", "per_layer_config", "quantization_config", "rope_scaling"]),
    ),
    "olmoe": ConfigClass(
        "OlmoeConfig",
        {"transformers_version": None, "architectures": None, "output_hidden_states": False, "return_dict": True,
         "dtype": None, "chunk_size_feed_forward": 0, "is_encoder_decoder": False, "id2label": None, "label2id": None,
         "problem_type": None, "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048,
         "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": None, "hidden_act": "silu",
         "max_position_embeddings": 4096, "initializer_range": 0.02, "rms_norm_eps": 1e-05, "use_cache": True,
         "pad_token_id": 1, "bos_token_id": None, "eos_token_id": 50279, "tie_word_embeddings": False,
         "rope_parameters": None, "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
         "num_experts_per_tok": 8, "num_experts": 64, "output_router_logits": False, "router_aux_loss_coef": 0.01,
         "norm_topk_prob": False, "rope_theta": 10000.0},
        frozenset(["bos_token_id", "clip_qkv", "eos_token_id", "num_key_value_heads", "pad_token_id",
         "rope_parameters"]),
        {"num_local_experts": "num_experts"},
        frozenset(["head_dim", "partial_rotary_factor", "per_layer_config", "quantization_config", "rope_scaling",
         "sliding_window"]),
    ),
    "gpt2": ConfigClass(
        "GPT2Config",
        {"transformers_version": None, "architectures": None, "output_hidden_states": False, "return_dict": True,
         "dtype": None, "chunk_size_feed_forward": 0, "is_encoder_decoder": False, "id2label": None, "label2id": None,
         "problem_type": None, "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
         "n_inner": None, "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
         "layer_norm_epsilon": 1e-05, "initializer_range": 0.02, "summary_type": "cls_index", "summary_use_proj":
         True, "summary_activation": None, "summary_proj_to_labels": True, "summary_first_dropout": 0.1,
         "scale_attn_weights": True, "use_cache": True, "bos_token_id": 50256, "eos_token_id": 50256, "pad_token_id":
         None, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False, "add_cross_attention":
         False, "tie_word_embeddings": True},
        frozenset(["bos_token_id", "eos_token_id", "n_inner", "pad_token_id", "summary_activation"]),
        {"hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
         "num_hidden_layers": "n_layer"},
        frozenset(["per_layer_config", "quantization_config"]),
    ),
}
