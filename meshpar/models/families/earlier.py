"""Decoders from before llama: GPT-NeoX, GPT-J, Falcon, OPT and BLOOM."""

from __future__ import annotations

from typing import Any

from meshpar.models.families.family import LAYER, Family, complete
from meshpar.models.families.keys import Keys
from meshpar.models.families.layer_norm import layer_norm
from meshpar.models.families.llama_like import decoder
from meshpar.models.families.options import MLP, Attention, DecoderOptions, Layer, Norm, Rope
from meshpar.models.foreign import Names, linear, rows, vector


def _head_dim(keys: Keys, width: int, heads: int, key: str = "hidden_size") -> int:
    if width % heads:
        keys.wrong(key, f"is {width}, no multiple of the {heads} heads")
    return max(1, width // heads)


def _neox(keys: Keys) -> DecoderOptions:
    width, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    head_dim = _head_dim(keys, width, heads)
    theta, fraction = keys.value("rotary_emb_base"), keys.value("rotary_pct")
    rope = keys.rope(head_dim, fraction=0.25 if fraction is None else keys.number("rotary_pct"), theta=theta)
    has_bias = keys.flag("attention_bias")
    of = Attention(
        heads=heads, kv_heads=heads, head_dim=head_dim, scale=head_dim**-0.5, form="fused", rope=rope,
        qkv_bias=has_bias, o_bias=has_bias,
    )  # fmt: skip
    inner = MLP(width=keys.size("intermediate_size"), act=keys.act(), is_gated=False, bias=True)
    layer = Layer(attention=of, mlp=inner, style="parallel" if keys.flag("use_parallel_residual") else "sequential")
    return decoder(keys, layer, layer_norm(keys))


def _gptj(keys: Keys) -> DecoderOptions:
    width, heads = keys.size("n_embd"), keys.size("n_head")
    head_dim = _head_dim(keys, width, heads, "n_embd")
    rotated = keys.size("rotary_dim", most=head_dim)
    if rotated % 2:
        keys.wrong("rotary_dim", f"is {rotated}: elements are rotated in pairs", f"rotary_dim: {rotated - 1}")
    rope = Rope(dim=rotated - rotated % 2, theta=1e4, is_interleaved=True)
    of = Attention(heads=heads, kv_heads=heads, head_dim=head_dim, scale=head_dim**-0.5, rope=rope)
    inner = MLP(
        width=keys.some_size("n_inner") or 4 * width, act=keys.act("activation_function"), is_gated=False, bias=True
    )
    layer = Layer(attention=of, mlp=inner, style="parallel", norms=("attn_in",))
    return DecoderOptions(
        vocab_size=keys.size("vocab_size"), width=width, layers=(layer,) * keys.size("n_layer", most=2**12),
        norm=layer_norm(keys, "layer_norm_epsilon"), max_seq_len=keys.size("n_positions"),
        is_tied=keys.flag("tie_word_embeddings"), head_bias=True,
    )  # fmt: skip


def _falcon(keys: Keys) -> DecoderOptions:
    width, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    head_dim = _head_dim(keys, width, heads)
    has_groups, is_parallel = keys.flag("new_decoder_architecture"), keys.flag("parallel_attn")
    if has_groups and not is_parallel:
        keys.wrong("parallel_attn", "is false, and new_decoder_architecture is supported with true only")
    grouped = keys.kv_heads(heads, "num_kv_heads")  # which other architectures have too, and do not use
    kv_heads = grouped if has_groups else heads
    is_multi_query = keys.flag("multi_query") and not has_groups
    alibi = keys.flag("alibi")
    rope = keys.rope(head_dim)
    has_bias = keys.flag("bias")
    of = Attention(
        heads=heads, kv_heads=1 if is_multi_query else kv_heads, head_dim=head_dim, scale=head_dim**-0.5,
        form="split" if is_multi_query else "fused", rope=None if alibi else rope, qkv_bias=has_bias, o_bias=has_bias,
        alibi="scaled" if alibi else None,
    )  # fmt: skip
    num_norms = keys.some_size("num_ln_in_parallel_attn") or (2 if has_groups else 1)
    if num_norms > 2 or (num_norms == 2 and not has_groups):
        keys.wrong("num_ln_in_parallel_attn", f"is {num_norms}, which this architecture has not")
    inner = MLP(
        width=keys.some_size("ffn_hidden_size") or 4 * width, act=keys.act("activation"), is_gated=False, bias=has_bias
    )
    style: Any = {"style": "parallel" if is_parallel else "sequential"}
    norms = ("attn_in", "mlp_in") if num_norms == 2 or not is_parallel else ("attn_in",)
    layer = Layer(attention=of, mlp=inner, norms=norms, **style)
    return decoder(keys, layer, layer_norm(keys, "layer_norm_epsilon"))


def _opt(keys: Keys) -> DecoderOptions:
    width, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    head_dim = _head_dim(keys, width, heads)
    if (inner_width := keys.some_size("word_embed_proj_dim", width)) != width:
        keys.wrong("word_embed_proj_dim", f"is {inner_width}, and only that of hidden_size, {width}, is supported")
    has_bias, is_before = keys.flag("enable_bias"), keys.flag("do_layer_norm_before")
    is_affine = keys.flag("layer_norm_elementwise_affine")
    of = Attention(
        heads=heads, kv_heads=heads, head_dim=head_dim, scale=head_dim**-0.5, qkv_bias=has_bias, o_bias=has_bias
    )
    inner = MLP(width=keys.size("ffn_dim"), act=keys.act("activation_function"), is_gated=False, bias=has_bias)
    after: Any = {} if is_before else {"style": "after", "norms": ("attn_out", "mlp_out")}
    return decoder(
        keys, Layer(attention=of, mlp=inner, **after),
        Norm(kind="layer", eps=1e-5, has_scale=is_affine, has_bias=is_affine),
        positions=keys.size("max_position_embeddings") + 2, position_offset=2,
        has_norm=is_before and not keys.flag("_remove_final_layer_norm"),
    )  # fmt: skip


def _bloom(keys: Keys) -> DecoderOptions:
    width, heads = keys.size("hidden_size"), keys.size("n_head")
    head_dim = _head_dim(keys, width, heads)
    of = Attention(
        heads=heads, kv_heads=heads, head_dim=head_dim, scale=head_dim**-0.5, form="fused", alibi="after",
        qkv_bias=True, o_bias=True,
    )  # fmt: skip
    inner = MLP(width=4 * width, act="gelu_tanh", is_gated=False, bias=True)
    return DecoderOptions(
        vocab_size=keys.size("vocab_size"), width=width,
        layers=(Layer(attention=of, mlp=inner),) * keys.size("n_layer", most=2**12),
        norm=layer_norm(keys, "layer_norm_epsilon"), max_seq_len=2048, has_embed_norm=True,
        is_tied=keys.flag("tie_word_embeddings"),
    )  # fmt: skip


def _names(outside: Names, layers: str, parts: Names) -> Names:
    """Names outside of the layers, and in each layer those after `layers`, with kernels and biases of projections."""
    found = dict(outside)
    for name, foreign in parts.items():
        if foreign.inputs:
            found[f"{layers}.{name}.weight"] = foreign
            biases = tuple(f"{part.removesuffix('.kernel')}.bias" for part in foreign.parts)
            found[f"{layers}.{name}.bias"] = vector(*biases)
        else:
            found[f"{layers}.{name}"] = foreign
    return complete(found)


_UP, _DOWN = linear(f"{LAYER}.mlp.up.kernel"), linear(f"{LAYER}.mlp.down.kernel")
_QKV, _O = linear(f"{LAYER}.attn.qkv.kernel"), linear(f"{LAYER}.attn.o.kernel", inputs=2)
_SPLIT = {x: linear(f"{LAYER}.attn.{x}.kernel") for x in "qkv"}
_ATTN_IN, _MLP_IN = vector(f"{LAYER}.attn_in"), vector(f"{LAYER}.mlp_in")
_ATTN_OUT, _MLP_OUT = vector(f"{LAYER}.attn_out"), vector(f"{LAYER}.mlp_out")
_HEAD: Names = {"lm_head.weight": linear("head.kernel"), "lm_head.bias": vector("head.bias")}
_H = {
    "self_attention.dense": _O, "input_layernorm": _ATTN_IN, "post_attention_layernorm": _MLP_IN,
    "mlp.dense_h_to_4h": _UP, "mlp.dense_4h_to_h": _DOWN,
}  # fmt: skip
_WORDS: Names = {
    "transformer.word_embeddings.weight": rows("embedding"),
    "transformer.word_embeddings_layernorm": vector("embed_norm"),
    "transformer.ln_f": vector("norm"),
} | _HEAD
_QKV_ALONE = linear(*(f"{LAYER}.attn.{x}.kernel" for x in "qkv"))


def _falcon_names(options: DecoderOptions) -> Names:
    """The names of one of Falcon's architectures."""
    of = options.layers[0]
    has_two = of.style == "parallel" and "mlp_in" in of.norms
    norms = {"ln_attn": _ATTN_IN, "ln_mlp": _MLP_IN} if has_two else {}
    assert isinstance(of.attention, Attention)
    qkv = _QKV if of.attention.form == "fused" else _QKV_ALONE
    parts = {"self_attention.query_key_value": qkv} | {
        name: foreign for name, foreign in _H.items() if not (has_two and "layernorm" in name)
    }
    return _names(_WORDS, "transformer.h.*", parts | norms)


FAMILIES = {
    "gpt_neox": Family(
        _neox,
        _names(
            {
                "gpt_neox.embed_in.weight": rows("embedding"), "gpt_neox.final_layer_norm": vector("norm"),
                "embed_out.weight": linear("head.kernel"),
            },
            "gpt_neox.layers.*",
            {
                "attention.query_key_value": _QKV, "attention.dense": _O, "input_layernorm": _ATTN_IN,
                "post_attention_layernorm": _MLP_IN, "mlp.dense_h_to_4h": _UP, "mlp.dense_4h_to_h": _DOWN,
            },
        ),
    ),
    "gptj": Family(
        _gptj,
        _names(
            {"transformer.wte.weight": rows("embedding"), "transformer.ln_f": vector("norm")} | _HEAD,
            "transformer.h.*",
            {f"attn.{x}_proj": foreign for x, foreign in _SPLIT.items()}
            | {"attn.out_proj": _O, "ln_1": _ATTN_IN, "mlp.fc_in": _UP, "mlp.fc_out": _DOWN},
        ),
    ),
    "falcon": Family(_falcon, _falcon_names),
    "opt": Family(
        _opt,
        lambda options: _names(
            {
                "model.decoder.embed_tokens.weight": rows("embedding"),
                "model.decoder.embed_positions.weight": rows("positions"),
                "model.decoder.final_layer_norm": vector("norm"),
            } | _HEAD,
            "model.decoder.layers.*",
            {f"self_attn.{x}_proj": foreign for x, foreign in _SPLIT.items()}
            | {"self_attn.out_proj": _O, "fc1": _UP, "fc2": _DOWN}
            | (
                {"self_attn_layer_norm": _ATTN_IN, "final_layer_norm": _MLP_IN}
                if options.layers[0].style == "sequential"
                else {"self_attn_layer_norm": _ATTN_OUT, "final_layer_norm": _MLP_OUT}
            ),
        ),
    ),
    "bloom": Family(_bloom, _names(_WORDS, "transformer.h.*", {"self_attention.query_key_value": _QKV} | _H)),
}  # fmt: skip
