"""Tiny configs of the encoders, each with the options that its config class has; and what transformers computes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

SEQ = 12
ROWS = 3
VOCAB = 96
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
TEXT = SIZES | {"vocab_size": VOCAB, "max_position_embeddings": 32}
PICTURE = SIZES | {"image_size": 8, "patch_size": 4, "num_channels": 3}
MODERN = TEXT | {"num_hidden_layers": 3, "local_attention": 4, "global_attn_every_n_layers": 2, "pad_token_id": 0}
ALL_BIASES = {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True}
END = 95
CLIP = {
    "text_config": TEXT | {"eos_token_id": END}, "vision_config": PICTURE | {"hidden_size": 24},
    "projection_dim": 16,
}  # fmt: skip
BASE: dict[str, dict[str, Any]] = {
    "bert": TEXT,
    "roberta": TEXT | {"pad_token_id": 1},
    "modernbert": MODERN,
    "vit": PICTURE,
    "clip": CLIP,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "bert-relu": {"hidden_act": "relu", "type_vocab_size": 3, "layer_norm_eps": 1e-3},
    "bert-unpadded": {"pad_token_id": None},
    "roberta-pad": {"pad_token_id": 3, "type_vocab_size": 1},
    "modernbert-biases": ALL_BIASES | {"classifier_pooling": "mean"},
    "modernbert-types": {"layer_types": ["sliding_attention", "full_attention", "full_attention"],
                         "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 500.0},
                                             "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}},
                         "hidden_activation": "silu", "decoder_bias": False, "classifier_activation": "relu"},
    "modernbert-thetas": {"global_rope_theta": 300.0, "local_rope_theta": 30.0, "norm_eps": 1e-3},
    "vit-wide": {"image_size": [8, 12], "patch_size": [4, 6], "num_channels": 1, "qkv_bias": False},
    "vit-pooler": {"pooler_output_size": 20, "pooler_act": "gelu", "hidden_act": "gelu_new"},
    "clip-largest": {"text_config": TEXT | {"eos_token_id": 2, "hidden_act": "gelu", "num_hidden_layers": 3}},
}  # fmt: skip
HEADS: dict[str, dict[str, str]] = {
    "bert": {"hidden": "BertModel", "masked_tokens": "BertForMaskedLM", "classify": "BertForSequenceClassification"},
    "roberta": {"hidden": "RobertaModel", "masked_tokens": "RobertaForMaskedLM",
                "classify": "RobertaForSequenceClassification"},
    "modernbert": {"hidden": "ModernBertModel", "masked_tokens": "ModernBertForMaskedLM",
                   "classify": "ModernBertForSequenceClassification"},
    "vit": {"hidden": "ViTModel", "classify": "ViTForImageClassification"},
    "clip": {"pairs": "CLIPModel"},
}  # fmt: skip
CASES = {kind: {"model_type": kind} | config for kind, config in BASE.items()}
CASES |= {name: CASES[name.partition("-")[0]] | changes for name, changes in VARIANTS.items()}
ALL = [(case, head) for case in CASES for head in HEADS[case.partition("-")[0]]]


def saved(case: str, head: str, folder: Path, **changes: Any) -> Any:
    """A folder of a class with random weights, as transformers writes it. Returns the model."""
    kind = case.partition("-")[0]
    config = transformers.AutoConfig.for_model(**CASES[case] | changes)
    return written(getattr(transformers, HEADS[kind][head]), config, folder)


def written(called: Any, config: Any, folder: Path) -> Any:
    generator = torch.Generator().manual_seed(0)
    model = called._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator) * 0.15
            param.copy_(noise + param if param.ndim <= 1 else noise)
    model.save_pretrained(folder)
    return model


def inputs(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Rows by our names: the shorter ones are padded, and tokens have two types."""
    draw = np.random.default_rng(0)
    found: dict[str, np.ndarray] = {}
    text = config.get("text_config", config)
    if "vocab_size" in text:
        pad = text.get("pad_token_id", 1 if config["model_type"] == "roberta" else 0)
        tokens = draw.integers(5, VOCAB - 2, (ROWS, SEQ))
        length = np.array([SEQ, SEQ - 3, SEQ - 5])[:, None]
        if config["model_type"] == "clip":
            tokens[np.arange(ROWS), length[:, 0] - 1] = END
            found["tokens"] = np.where(np.arange(SEQ) < length, tokens, END)
        else:
            found["tokens"] = tokens if pad is None else np.where(np.arange(SEQ) < length, tokens, pad)
        if config["model_type"] == "bert":
            found["types"] = draw.integers(0, 2, (ROWS, SEQ))
        found["tokens"] = found["tokens"].astype(np.int32)
    picture = config.get("vision_config", config)
    if "image_size" in picture:
        size = picture["image_size"]
        height, width = size if isinstance(size, list) else (size, size)
        found["image"] = draw.normal(size=(ROWS, height, width, picture["num_channels"])).astype(np.float32)
    return found


def computed_by(model: Any, given: dict[str, np.ndarray], pad: int | None = None) -> dict[str, np.ndarray]:
    """What transformers computes: name -> array."""
    arrays: dict[str, Any] = {}
    if "tokens" in given:
        arrays["input_ids"] = torch.tensor(given["tokens"], dtype=torch.long)
        if pad is not None:
            arrays["attention_mask"] = (arrays["input_ids"] != pad).long()
    if "types" in given:
        arrays["token_type_ids"] = torch.tensor(given["types"], dtype=torch.long)
    if "image" in given:
        arrays["pixel_values"] = torch.tensor(given["image"]).permute(0, 3, 1, 2).to(model.dtype)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model(**arrays)
    return {name: x.numpy() for name, x in out.items() if isinstance(x, torch.Tensor)}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())
