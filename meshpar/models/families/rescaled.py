"""Kinds of meshpar's own decoders, for scalings that those do not compute: YaRN, dynamic, longrope; and Ministral 3."""

from __future__ import annotations

from typing import Any

from meshpar.models.families.family import LAYER, Family, named
from meshpar.models.families.keys import FULL, SLIDING, Keys
from meshpar.models.families.llama_like import attention, biases, decoder, mlp, rms, windowed
from meshpar.models.families.options import Attention, DecoderOptions, Layer
from meshpar.models.foreign import linear


def _llama(keys: Keys) -> DecoderOptions:
    of = attention(keys, **biases(keys))
    layer = Layer(attention=of, mlp=mlp(keys, bias=keys.flag("mlp_bias")))
    return decoder(keys, layer, rms(keys))


def _mistral(keys: Keys) -> DecoderOptions:
    of = attention(keys, window=keys.some_size("sliding_window"))
    return decoder(keys, Layer(attention=of, mlp=mlp(keys)), rms(keys))


def _qwen2(keys: Keys) -> DecoderOptions:
    return _qwen(keys, attention(keys, qkv_bias=True))


def _qwen3(keys: Keys) -> DecoderOptions:
    norm = rms(keys)
    return _qwen(keys, attention(keys, qk_norm=norm, **biases(keys)))


def _qwen(keys: Keys, of: Attention) -> DecoderOptions:
    uses = keys.flag("use_sliding_window") and keys.value("sliding_window") is not None
    first = keys.size("max_window_layers", least=0)
    types = [SLIDING if uses and i >= first else FULL for i in range(keys.num_layers)]
    keys.value("sliding_window")
    windows = keys.windows(types) if uses else [None for _ in keys.layer_list("layer_types", types, (FULL,))]
    return decoder(keys, windowed(of, mlp(keys), windows), rms(keys))


def _phi3(keys: Keys) -> DecoderOptions:
    of = attention(keys, rope=keys.rope(fraction=1.0), window=keys.some_size("sliding_window"))
    return decoder(keys, Layer(attention=of, mlp=mlp(keys)), rms(keys))


def _ministral3(keys: Keys) -> DecoderOptions:
    usual: dict[str, Any] = {
        "type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
    }  # fmt: skip
    rope = keys.rope(plain=usual, own=("llama_4_scaling_beta", "max_position_embeddings"))
    names = ("llama_4_scaling_beta", "original_max_position_embeddings")
    beta, original = (keys.rope_number(name, usual) for name in names)
    of = attention(
        keys, rope=rope, window=keys.some_size("sliding_window"), position_scale=(beta, int(original)) if beta else None
    )
    return decoder(keys, Layer(attention=of, mlp=mlp(keys)), rms(keys))


FAMILIES = {
    "llama": Family(_llama, named()),
    "mistral": Family(_mistral, named()),
    "qwen2": Family(_qwen2, named()),
    "qwen3": Family(_qwen3, named()),
    "phi3": Family(
        _phi3,
        named(
            more={
                "model.layers.*.self_attn.qkv_proj.weight": linear(*(f"{LAYER}.attn.{x}.kernel" for x in "qkv")),
                "model.layers.*.mlp.gate_up_proj.weight": linear(*(f"{LAYER}.mlp.{x}.kernel" for x in ("gate", "up"))),
            }
        ),
    ),
    "ministral3": Family(_ministral3, named()),
}
