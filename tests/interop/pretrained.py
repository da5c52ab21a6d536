"""Tiny models as transformers makes and saves them: random weights, no network."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import transformers

VOCAB = 96
SEQ = 24
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
KINDS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama_biases": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama3_rope": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "linear_rope": lambda: transformers.LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 4.0}),
    "smollm": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=5),
    "qwen2": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16, rope_theta=1e6),
    "phi3": lambda: transformers.Phi3Config(**SIZES, partial_rotary_factor=0.5),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=False
    ),
    "qwen3_moe_some_layers": lambda: transformers.Qwen3MoeConfig(
        **SIZES | {"num_hidden_layers": 6}, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        mlp_only_layers=[0, 1, 2], decoder_sparse_step=2,
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**SIZES, num_experts=6, num_experts_per_tok=3),
    "ministral": lambda: transformers.MinistralConfig(
        **SIZES, head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None
    ),
}  # fmt: skip


def made(kind: str) -> Any:
    """A model with random weights, biases and norms, so that each of them changes the logits."""
    return randomized(KINDS[kind]())


def randomized(config: Any) -> Any:
    """The model of a config, with random weights, biases and norms."""
    generator = torch.Generator().manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator) * 0.15
            param.copy_(noise + param if param.ndim == 1 else noise)
    return model


def saved(kind: str, folder: Path, dtype: str = "float32", **options: Any) -> Path:
    made(kind).to(getattr(torch, dtype)).save_pretrained(folder, **options)
    return folder


def saved_with(config: dict[str, Any], folder: Path) -> Path:
    """Random weights for a `config.json`, which is written as given, and not as transformers would complete it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    randomized(transformers.AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def loaded(folder: Path) -> Any:
    """The model of a folder, as transformers loads it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()


def logits(model: Any, tokens: Any) -> Any:
    """float32[batch, seq, vocab], computed by transformers."""
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()
