"""Gemma 1, 2 and 3 (text): RMSNorm around 1, a scaled embedding, and from Gemma 2 on a norm after each part too."""

from __future__ import annotations

from dataclasses import replace

from meshpar.models.families.family import Family, named
from meshpar.models.families.keys import FULL, SLIDING, Keys
from meshpar.models.families.llama_like import attention, biases, decoder, mlp, rms, windowed
from meshpar.models.families.options import DecoderOptions, Layer
from meshpar.models.foreign import vector

SANDWICH = ("attn_in", "attn_out", "mlp_in", "mlp_out")


def _gemma(keys: Keys) -> DecoderOptions:
    act = keys.act()
    inner = replace(mlp(keys), act="gelu_tanh" if act == "gelu" else act)  # as the official files mean it
    layer = Layer(attention=attention(keys, **biases(keys)), mlp=inner)
    scale = keys.size("hidden_size") ** 0.5
    return decoder(keys, layer, rms(keys, offset=1.0), embed_scale=scale)


def _gemma2(keys: Keys) -> DecoderOptions:
    scale = keys.size("query_pre_attn_scalar") ** -0.5
    of = attention(keys, scale=scale, cap=keys.some_number("attn_logit_softcapping"), **biases(keys))
    layers = windowed(of, mlp(keys, "hidden_activation"), keys.windows_but_every(2), norms=SANDWICH)
    return decoder(
        keys, layers, rms(keys, offset=1.0), embed_scale=keys.size("hidden_size") ** 0.5,
        cap=keys.some_number("final_logit_softcapping"),
    )  # fmt: skip


def _gemma3(keys: Keys) -> DecoderOptions:
    norm = rms(keys, offset=1.0)
    thetas = keys.given["rope_theta"] if isinstance(keys.given["rope_theta"], dict) else {}
    full = keys.value("rope_theta") if not thetas else thetas["global"]
    local = keys.value("rope_local_base_freq") or 1e4
    ropes = keys.ropes(full, local)
    of = attention(
        keys, rope=ropes[FULL], scale=keys.size("query_pre_attn_scalar") ** -0.5, qk_norm=norm, **biases(keys)
    )
    windows = keys.windows_but_every(keys.some_size("sliding_window_pattern", 6) or 6)
    inner = mlp(keys, "hidden_activation")
    layers = [
        Layer(attention=replace(of, window=one, rope=ropes[SLIDING if one else FULL]), mlp=inner, norms=SANDWICH)
        for one in windows
    ]
    return decoder(
        keys, layers, norm, embed_scale=keys.size("hidden_size") ** 0.5, cap=keys.some_number("final_logit_softcapping")
    )


NAMES = named(
    more={
        "model.layers.*.post_attention_layernorm": vector("layers.*.attn_out"),
        "model.layers.*.pre_feedforward_layernorm": vector("layers.*.mlp_in"),
        "model.layers.*.post_feedforward_layernorm": vector("layers.*.mlp_out"),
    }
)
FAMILIES = {
    "gemma": Family(_gemma, named()),
    "gemma2": Family(_gemma2, NAMES),
    "gemma3_text": Family(_gemma3, NAMES),
}
