"""OLMo 1 to 3 and EXAONE 4, whose norms follow attention and MLP."""

from __future__ import annotations

from dataclasses import replace

from meshpar.models.families.family import Family, named
from meshpar.models.families.keys import FULL, SLIDING, Keys
from meshpar.models.families.llama_like import attention, biases, decoder, mlp, rms
from meshpar.models.families.options import DecoderOptions, Layer, Norm
from meshpar.models.foreign import vector

AFTER = ("attn_out", "mlp_out")


def _olmo(keys: Keys) -> DecoderOptions:
    layer = Layer(attention=attention(keys, clip=keys.some_number("clip_qkv"), **biases(keys)), mlp=mlp(keys))
    return decoder(keys, layer, Norm(kind="layer", eps=1e-5, has_scale=False))


def _olmo2(keys: Keys) -> DecoderOptions:
    norm = rms(keys)
    of = attention(keys, qk_norm=norm, norm_over="all_heads", **biases(keys))
    return decoder(keys, Layer(attention=of, mlp=mlp(keys), norms=AFTER), norm)


def _olmo3(keys: Keys) -> DecoderOptions:
    norm = rms(keys)
    ropes = keys.ropes(None, 5e5)  # `rope_theta` of a file is that of full attention
    of = attention(keys, rope=ropes[FULL], qk_norm=norm, norm_over="all_heads", **biases(keys))
    windows, inner = keys.windows_but_every(4), mlp(keys)
    layers = [
        Layer(attention=replace(of, window=one, rope=ropes[SLIDING if one else FULL]), mlp=inner, norms=AFTER)
        for one in windows
    ]
    return decoder(keys, layers, norm)


def _exaone4(keys: Keys) -> DecoderOptions:
    norm = rms(keys)
    of = attention(keys, qk_norm=norm)
    has_window = keys.value("sliding_window") is not None
    every = keys.some_size("sliding_window_pattern") if has_window else None
    windows = keys.windows([SLIDING if every and (i + 1) % every else FULL for i in range(keys.num_layers)])
    inner = mlp(keys)
    layers = [
        Layer(
            attention=replace(of, window=one, rope=of.rope if one or not has_window else None), mlp=inner, norms=AFTER
        )
        for one in windows
    ]
    return decoder(keys, layers, norm)


NAMES = named(
    more={
        "model.layers.*.post_attention_layernorm": vector("layers.*.attn_out"),
        "model.layers.*.post_feedforward_layernorm": vector("layers.*.mlp_out"),
    }
)
FAMILIES = {
    "olmo": Family(_olmo, named()),
    "olmo2": Family(_olmo2, NAMES),
    "olmo3": Family(_olmo3, NAMES),
    "exaone4": Family(_exaone4, NAMES),
}
