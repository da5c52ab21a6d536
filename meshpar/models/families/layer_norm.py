"""Families with LayerNorm in place of RMSNorm: StarCoder 2, Nemotron, StableLM, Phi, Cohere; and GLM 4's four norms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshpar.models.families.family import Family, exact, named
from meshpar.models.families.gemma import SANDWICH
from meshpar.models.families.keys import Keys
from meshpar.models.families.llama_like import attention, biases, decoder, mlp, rms
from meshpar.models.families.options import DecoderOptions, Layer, Norm
from meshpar.models.foreign import linear, vector


def layer_norm(keys: Keys, key: str = "layer_norm_eps", **options: Any) -> Norm:
    return Norm(kind="layer", eps=keys.number(key), **{"has_bias": True} | options)


def _starcoder(keys: Keys) -> DecoderOptions:
    has_bias = keys.flag("use_bias")
    of = attention(keys, window=keys.some_size("sliding_window"), **biases(keys, "use_bias"))
    layer = Layer(attention=of, mlp=mlp(keys, is_gated=False, bias=has_bias))
    return decoder(keys, layer, layer_norm(keys, "norm_epsilon"))


def _nemotron(keys: Keys) -> DecoderOptions:
    of = attention(keys, rope=keys.rope(fraction=0.5), **biases(keys))
    layer = Layer(attention=of, mlp=mlp(keys, is_gated=False, bias=keys.flag("mlp_bias")))
    return decoder(keys, layer, layer_norm(keys, "norm_eps", offset=1.0))


def _stablelm(keys: Keys) -> DecoderOptions:
    norm = layer_norm(keys)
    qk_norm = replace(norm, has_bias=False) if keys.flag("qk_layernorm") else None
    of = attention(
        keys, rope=keys.rope(fraction=0.25), qkv_bias=keys.flag("use_qkv_bias"), qk_norm=qk_norm, norm_over="each_head"
    )
    is_parallel = keys.flag("use_parallel_residual")
    parallel: Any = {"style": "parallel", "norms": ("attn_in",)} if is_parallel else {}
    return decoder(keys, Layer(attention=of, mlp=mlp(keys), **parallel), norm)


def _phi(keys: Keys) -> DecoderOptions:
    norm = layer_norm(keys)
    of = attention(
        keys, rope=keys.rope(fraction=0.5), qkv_bias=True, o_bias=True,
        qk_norm=norm if keys.flag("qk_layernorm") else None,
    )  # fmt: skip
    layer = Layer(attention=of, mlp=mlp(keys, is_gated=False, bias=True), style="parallel", norms=("attn_in",))
    return decoder(keys, layer, norm, head_bias=True)


def _cohere(keys: Keys) -> DecoderOptions:
    norm = layer_norm(keys, has_bias=False)
    rope = keys.rope(is_interleaved=True)
    qk_norm = norm if keys.flag("use_qk_norm") else None
    of = attention(keys, rope=rope, qk_norm=qk_norm, norm_over="each_head", **biases(keys))
    layer = Layer(attention=of, mlp=mlp(keys), style="parallel", norms=("attn_in",))
    return decoder(keys, layer, norm, logit_scale=keys.number("logit_scale"))


def _cohere2(keys: Keys) -> DecoderOptions:
    rope = keys.rope(is_interleaved=True)
    of = attention(keys, rope=rope, **biases(keys))
    windows = keys.windows_but_every(keys.some_size("sliding_window_pattern", 4) or 4)
    inner = mlp(keys)
    layers = [
        Layer(
            attention=replace(of, window=one, rope=rope if one else None), mlp=inner, style="parallel",
            norms=("attn_in",),
        )
        for one in windows
    ]  # fmt: skip
    return decoder(keys, layers, layer_norm(keys, has_bias=False), logit_scale=keys.number("logit_scale"))


def _glm4(keys: Keys) -> DecoderOptions:
    rope = keys.rope(fraction=0.5, is_interleaved=True)
    of = attention(keys, rope=rope, qkv_bias=keys.flag("attention_bias"))
    layer = Layer(attention=of, mlp=mlp(keys, form="fused"), norms=SANDWICH)
    return decoder(keys, layer, rms(keys))


_ATTN = "model.layers.*.self_attn"
FAMILIES = {
    "starcoder2": Family(_starcoder, named({"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"})),
    "nemotron": Family(_nemotron, named()),
    "stablelm": Family(
        _stablelm,
        named(
            more={
                f"{_ATTN}.{x}_layernorm.norms.#.weight": vector(f"layers.*.attn.{x}_norm.scale") for x in "qk"
            }
        ),
    ),
    "phi": Family(
        _phi,
        named(
            {"model.norm": "model.final_layernorm", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2",
             "self_attn.o_proj": "self_attn.dense", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
        ),
    ),
    "cohere": Family(
        _cohere, named(more={f"{_ATTN}.{x}_norm.weight": exact(f"layers.*.attn.{x}_norm.scale") for x in "qk"})
    ),
    "cohere2": Family(_cohere2, named()),
    "glm4": Family(
        _glm4,
        named(
            more={
                "model.layers.*.post_self_attn_layernorm": vector("layers.*.attn_out"),
                "model.layers.*.post_mlp_layernorm": vector("layers.*.mlp_out"),
                "model.layers.*.mlp.gate_up_proj.weight": linear("layers.*.mlp.gate_up.kernel"),
            }
        ),
    ),
}  # fmt: skip
