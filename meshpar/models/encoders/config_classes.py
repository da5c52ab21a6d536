"""Keys and defaults of the config classes of the encoders. `scripts/config_classes.py` writes this file."""

from __future__ import annotations

from collections.abc import Mapping

from meshpar.models.config_classes import ConfigClass

# fmt: off
CONFIG_CLASSES: Mapping[str, ConfigClass] = {
    "bert": ConfigClass(
        "BertConfig",
        {"transformers_version": None, "architectures": None, "output_hidden_states": False, "return_dict": True,
         "dtype": None, "chunk_size_feed_forward": 0, "is_encoder_decoder": False, "id2label": None, "label2id": None,
         "problem_type": None, "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12,
         "num_attention_heads": 12, "intermediate_size": 3072, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
         "attention_probs_dropout_prob": 0.1, "max_position_embeddings": 512, "type_vocab_size": 2,
         "initializer_range": 0.02, "layer_norm_eps": 1e-12, "pad_token_id": 0, "use_cache": True,
         "classifier_dropout": None, "is_decoder": False, "add_cross_attention": False, "bos_token_id": None,
         "eos_token_id": None, "tie_word_embeddings": True},
        frozenset(["bos_token_id", "classifier_dropout", "eos_token_id", "pad_token_id"]),
        {},
        frozenset(["per_layer_config", "quantization_config"]),
    ),
    "roberta": ConfigClass(
        "RobertaConfig",
        {"transformers_version": None, "architectures": None, "output_hidden_states": False, "return_dict": True,
         "dtype": None, "chunk_size_feed_forward": 0, "is_encoder_decoder": False, "id2label": None, "label2id": None,
         "problem_type": None, "vocab_size": 50265, "hidden_size": 768, "num_hidden_layers": 12,
         "num_attention_heads": 12, "intermediate_size": 3072, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
         "attention_probs_dropout_prob": 0.1, "max_position_embeddings": 512, "type_vocab_size": 2,
         "initializer_range": 0.02, "layer_norm_eps": 1e-12, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
         "use_cache": True, "classifier_dropout": None, "is_decoder": False, "add_cross_attention": False,
         "tie_word_embeddings": True},
        frozenset(["bos_token_id", "classifier_dropout", "eos_token_id", "pad_token_id"]),
        {},
        frozenset(["per_layer_config", "quantization_config"]),
    ),
    "modernbert": ConfigClass(
        "ModernBertConfig",
        {"transformers_version": None, "architectures": None, "output_hidden_states": False, "return_dict": True,
         "dtype": None, "chunk_size_feed_forward": 0, "is_encoder_decoder": False, "id2label": None, "label2id": None,
         "problem_type": None, "vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152,
         "num_hidden_layers": 22, "num_attention_heads": 12, "hidden_activation": "gelu", "max_position_embeddings":
         8192, "initializer_range": 0.02, "initializer_cutoff_factor": 2.0, "norm_eps": 1e-05, "norm_bias": False,
         "pad_token_id": 50283, "eos_token_id": 50282, "bos_token_id": 50281, "cls_token_id": 50281, "sep_token_id":
         50282, "attention_bias": False, "attention_dropout": 0.0, "layer_types": None, "rope_parameters": None,
         "local_attention": 128, "embedding_dropout": 0.0, "mlp_bias": False, "mlp_dropout": 0.0, "decoder_bias":
         True, "classifier_pooling": "cls", "classifier_dropout": 0.0, "classifier_bias": False,
         "classifier_activation": "gelu", "deterministic_flash_attn": False, "sparse_prediction": False,
         "sparse_pred_ignore_index": -100, "tie_word_embeddings": True, "rope_theta": {"global": 160000.0, "local":
         10000.0}},
        frozenset(["bos_token_id", "cls_token_id", "eos_token_id", "layer_types", "pad_token_id", "rope_parameters",
         "sep_token_id"]),
        {},
        frozenset(["global_attn_every_n_layers", "global_rope_theta", "head_dim", "local_rope_theta",
         "partial_rotary_factor", "per_layer_config", "quantization_config", "rope_scaling"]),
    ),
    "vit": ConfigClass(
        "ViTConfig",
        {"transformers_version": None, "architectures": None, "output_hidden_states": False, "return_dict": True,
         "dtype": None, "chunk_size_feed_forward": 0, "is_encoder_decoder": False, "id2label": None, "label2id": None,
         "problem_type": None, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
         "intermediate_size": 3072, "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob":
         0.0, "initializer_range": 0.02, "layer_norm_eps": 1e-12, "image_size": 224, "patch_size": 16, "num_channels":
         3, "qkv_bias": True, "encoder_stride": 16, "pooler_output_size": None, "pooler_act": "tanh"},
        frozenset(["pooler_output_size"]),
        {},
        frozenset(["head_dim", "per_layer_config", "quantization_config"]),
    ),
    "clip": ConfigClass(
        "CLIPConfig",
        {"transformers_version": None, "architectures": None, "output_hidden_states": False, "return_dict": True,
         "dtype": None, "chunk_size_feed_forward": 0, "is_encoder_decoder": False, "id2label": None, "label2id": None,
         "problem_type": None, "text_config": None, "vision_config": None, "projection_dim": 512,
         "logit_scale_init_value": 2.6592, "initializer_factor": 1.0},
        frozenset(["initializer_factor", "logit_scale_init_value", "projection_dim", "text_config", "vision_config"]),
        {},
        frozenset(["per_layer_config", "quantization_config", "text_config_dict", "vision_config_dict"]),
    ),
    "clip_text_model": ConfigClass(
        "CLIPTextConfig",
        {"transformers_version": None, "architectures": None, "output_hidden_states": False, "return_dict": True,
         "dtype": None, "chunk_size_feed_forward": 0, "is_encoder_decoder": False, "id2label": None, "label2id": None,
         "problem_type": None, "vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "projection_dim":
         512, "num_hidden_layers": 12, "num_attention_heads": 8, "max_position_embeddings": 77, "hidden_act":
         "quick_gelu", "layer_norm_eps": 1e-05, "attention_dropout": 0.0, "initializer_range": 0.02,
         "initializer_factor": 1.0, "pad_token_id": 1, "bos_token_id": 49406, "eos_token_id": 49407},
        frozenset(["attention_dropout", "bos_token_id", "eos_token_id", "initializer_factor", "layer_norm_eps",
         "pad_token_id", "projection_dim"]),
        {},
        frozenset(["per_layer_config", "quantization_config"]),
    ),
    "clip_vision_model": ConfigClass(
        "CLIPVisionConfig",
        {"transformers_version": None, "architectures": None, "output_hidden_states": False, "return_dict": True,
         "dtype": None, "chunk_size_feed_forward": 0, "is_encoder_decoder": False, "id2label": None, "label2id": None,
         "problem_type": None, "hidden_size": 768, "intermediate_size": 3072, "projection_dim": 512,
         "num_hidden_layers": 12, "num_attention_heads": 12, "num_channels": 3, "image_size": 224, "patch_size": 32,
         "hidden_act": "quick_gelu", "layer_norm_eps": 1e-05, "attention_dropout": 0.0, "initializer_range": 0.02,
         "initializer_factor": 1.0},
        frozenset(["attention_dropout", "image_size", "patch_size"]),
        {},
        frozenset(["per_layer_config", "quantization_config"]),
    ),
}
