"""Families whose layers are those of llama: RMSNorm before attention and before a gated MLP, with options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshpar.models.families.family import Family, exact, named
from meshpar.models.families.keys import FULL, SLIDING, Keys
from meshpar.models.families.options import MLP, Attention, DecoderOptions, Experts, Layer, Norm, Rope
from meshpar.models.foreign import Names


def rms(keys: Keys, key: str = "rms_norm_eps", offset: float = 0.0) -> Norm:
    return Norm(eps=keys.number(key), offset=offset)


def attention(keys: Keys, *, rope: Rope | None = None, **options: Any) -> Attention:
    """The attention of a config with the usual names of sizes; whole heads are rotated unless `rope` is given."""
    heads, head_dim = keys.size("num_attention_heads"), keys.head_dim
    usual = {"scale": head_dim**-0.5, "rope": rope or keys.rope()}
    return Attention(heads=heads, kv_heads=keys.kv_heads(heads), head_dim=head_dim, **usual | options)


def biases(keys: Keys, key: str = "attention_bias") -> dict[str, Any]:
    """All four projections of attention have a bias, or none."""
    has_bias = keys.flag(key)
    return {"qkv_bias": has_bias, "o_bias": has_bias}


def mlp(keys: Keys, act: str = "hidden_act", **options: Any) -> MLP:
    return MLP(width=keys.size("intermediate_size"), act=keys.act(act), **options)


def decoder(keys: Keys, layers: Layer | list[Layer], norm: Norm, **options: Any) -> DecoderOptions:
    """A decoder with the usual names of sizes, of different layers or of equal ones."""
    every = layers if isinstance(layers, list) else [layers] * keys.num_layers
    return DecoderOptions(
        vocab_size=keys.size("vocab_size"), width=keys.size("hidden_size"), layers=tuple(every), norm=norm,
        max_seq_len=keys.size("max_position_embeddings"),
        **{"is_tied": keys.flag("tie_word_embeddings")} | options,
    )  # fmt: skip


def windowed(of: Attention, inner: MLP | Experts, windows: Sequence[int | None], **options: Any) -> list[Layer]:
    """Layers that differ in their windows."""
    return [Layer(attention=replace(of, window=one), mlp=inner, **options) for one in windows]


def _seed_oss(keys: Keys) -> DecoderOptions:
    of = attention(keys, qkv_bias=keys.flag("attention_bias"), o_bias=keys.flag("attention_out_bias"))
    layer = Layer(attention=of, mlp=mlp(keys, bias=keys.flag("mlp_bias")))
    return decoder(keys, layer, rms(keys))


def _ernie(keys: Keys) -> DecoderOptions:
    of = attention(keys, rope=keys.rope(is_interleaved=True), **biases(keys, "use_bias"))
    return decoder(keys, Layer(attention=of, mlp=mlp(keys, bias=keys.flag("use_bias"))), rms(keys))


def _internlm(keys: Keys) -> DecoderOptions:
    if keys.flag("attention_bias") != keys.flag("mlp_bias"):
        keys.wrong("attention_bias", "differs from mlp_bias: this model has a bias in all projections, or in none")
    layer = Layer(attention=attention(keys, **biases(keys)), mlp=mlp(keys, bias=keys.flag("mlp_bias")))
    return decoder(keys, layer, rms(keys))


def _hunyuan(keys: Keys) -> DecoderOptions:
    norm = rms(keys)
    of = attention(keys, qk_norm=norm, norms_rotated=True, **biases(keys))
    return decoder(keys, Layer(attention=of, mlp=mlp(keys)), norm)


def _smollm(keys: Keys) -> DecoderOptions:
    num = keys.num_layers
    every = keys.size("no_rope_layer_interval")
    rotates = keys.layer_list("no_rope_layers", [int((i + 1) % every != 0) for i in range(num)], (0, 1))
    has_window = keys.flag("use_sliding_window") and keys.value("sliding_window") is not None
    types = [SLIDING if has_window and not one else FULL for one in rotates]
    of, inner = attention(keys, **biases(keys)), mlp(keys, bias=keys.flag("mlp_bias"))
    layers = [
        Layer(attention=replace(of, window=window, rope=of.rope if turns else None), mlp=inner)
        for window, turns in zip(keys.windows(types), rotates, strict=True)
    ]
    return decoder(keys, layers, rms(keys))


def _apertus(keys: Keys) -> DecoderOptions:
    norm = rms(keys)
    usual = {"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "original_max_position_embeddings": 8192,
             "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # fmt: skip
    keys.only("hidden_act", "xielu", "only xielu is supported for this model")
    inner = MLP(width=keys.size("intermediate_size"), act="xielu", is_gated=False)
    layer = Layer(attention=attention(keys, rope=keys.rope(plain=usual), qk_norm=norm, **biases(keys)), mlp=inner)
    return decoder(keys, layer, norm)


_XIELU: Names = {
    f"model.layers.*.mlp.act_fn.{x}": exact(f"layers.*.mlp.act.{x}") for x in ("alpha_p", "alpha_n", "beta", "eps")
}
FAMILIES = {
    "seed_oss": Family(_seed_oss, named()),
    "ernie4_5": Family(_ernie, named()),
    "internlm3": Family(_internlm, named()),
    "hunyuan_v1_dense": Family(_hunyuan, named({"q_norm": "query_layernorm", "k_norm": "key_layernorm"})),
    "smollm3": Family(_smollm, named()),
    "apertus": Family(
        _apertus,
        named({"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"}, _XIELU),
    ),
}
