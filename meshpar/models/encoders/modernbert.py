"""ModernBERT: rotary positions, a norm before each part, gated MLPs, and layers that attend only nearby."""

from __future__ import annotations

from dataclasses import replace

from meshpar.models.encoders.family import EncoderFamily, Options, Wanted, dense, norm_of, normed, rate
from meshpar.models.encoders.options import (
    Attention,
    Classes,
    EncoderOptions,
    Head,
    Hidden,
    Layer,
    Pairs,
    Text,
    Transform,
    Vocabulary,
)
from meshpar.models.families.keys import FULL, SLIDING, Keys
from meshpar.models.families.options import MLP, Norm
from meshpar.models.foreign import Names, linear, rows, vector


def _read(keys: Keys, wanted: Wanted) -> Options:
    norm = norm_of(keys, "norm_eps", keys.flag("norm_bias"))
    width, num = keys.size("hidden_size"), keys.num_layers
    tower = Text(
        vocab_size=keys.size("vocab_size"), width=width, layers=_layers(keys, num), norm=norm, has_norm=True,
        max_seq_len=keys.size("max_position_embeddings"), pad_id=keys.value("pad_token_id"),
        dropout=rate(keys, "embedding_dropout"),
    )  # fmt: skip
    return EncoderOptions(tower=tower, head=_head(keys, wanted, width, norm))


def _layers(keys: Keys, num: int) -> tuple[Layer, ...]:
    heads, head_dim = keys.size("num_attention_heads"), keys.head_dim
    every = keys.some_size("global_attn_every_n_layers", 3) or 3
    types = keys.layer_list("layer_types", [SLIDING if i % every else FULL for i in range(num)], (SLIDING, FULL))
    thetas = keys.given["rope_theta"]
    default = thetas if isinstance(thetas, dict) else {"global": 16e4, "local": 1e4}
    keys.read.add("rope_theta")
    base = {
        FULL: keys.some_number("global_rope_theta") or default["global"],
        SLIDING: keys.some_number("local_rope_theta") or default["local"],
    }
    has_bias = keys.flag("attention_bias")
    dropout = rate(keys, "attention_dropout")
    of = Attention(heads=heads, head_dim=head_dim, qkv_bias=has_bias, o_bias=has_bias, dropout=dropout)
    reach = keys.size("local_attention", least=2) // 2
    ropes = keys.ropes(base[FULL], base[SLIDING])
    attentions = {kind: replace(of, rope=ropes[kind], reach=reach if kind == SLIDING else None) for kind in ropes}
    mlp = MLP(
        width=keys.size("intermediate_size"),
        act=keys.act("hidden_activation"),
        form="fused",
        bias=keys.flag("mlp_bias"),
    )
    return tuple(
        Layer(
            attention=attentions[kind], mlp=mlp, has_attn_norm=i > 0, attn_dropout=dropout,
            inner_dropout=rate(keys, "mlp_dropout"),
        )
        for i, kind in enumerate(types)
    )  # fmt: skip


def _head(keys: Keys, wanted: Wanted, width: int, norm: Norm) -> Head:
    act = keys.act("classifier_activation")
    transform = Transform(act=act, width=width, bias=keys.flag("classifier_bias"), norm=norm)  # pyright: ignore
    pooling, has_bias = keys.choice("classifier_pooling", ("cls", "mean")), keys.flag("decoder_bias")
    dropout = rate(keys, "classifier_dropout")
    keys.value("tie_word_embeddings")
    if wanted.head == "masked_tokens":
        keys.only("tie_word_embeddings", True, "the output projection is the embedding here; tie_word_embeddings: true")
        return Vocabulary(transform=transform, bias=has_bias)
    if wanted.head == "classify":
        return Classes(num=wanted.num, pooling=pooling, transform=transform, dropout=dropout)  # pyright: ignore
    return Pairs(pooling=wanted.pooling) if wanted.head == "pairs" else Hidden()


def _names(options: Options) -> Names:
    attn, mlp, layer = "tower.layers.*.attn", "tower.layers.*.mlp", "model.layers.*"
    return {
        "model.embeddings.tok_embeddings.weight": rows("tower.embedding"),
        **normed("model.embeddings.norm", "tower.embed_norm"),
        **normed(f"{layer}.attn_norm", "tower.layers.*.attn_norm"),
        **normed(f"{layer}.mlp_norm", "tower.layers.*.mlp_norm"),
        f"{layer}.attn.Wqkv.weight": linear(*(f"{attn}.{x}.kernel" for x in "qkv")),
        f"{layer}.attn.Wqkv.bias": vector(*(f"{attn}.{x}.bias" for x in "qkv")),
        **dense(f"{layer}.attn.Wo", f"{attn}.o", inputs=2),
        **dense(f"{layer}.mlp.Wi", f"{mlp}.gate_up"),
        **dense(f"{layer}.mlp.Wo", f"{mlp}.down"),
        **normed("model.final_norm", "tower.norm"),
        **dense("head.dense", "head.transform.dense"),
        **normed("head.norm", "head.transform.norm"),
        "decoder.bias": vector("head.bias"),
        **dense("classifier", "head.classes"),
    }


FAMILIES = {
    "modernbert": EncoderFamily(
        _read, _names, "model.",
        {"hidden": "ModernBertModel", "masked_tokens": "ModernBertForMaskedLM",
         "classify": "ModernBertForSequenceClassification"},
        others=(r"head\..*", r"decoder\..*", r"classifier\..*"),
        without_effect=frozenset({
            "initializer_cutoff_factor", "deterministic_flash_attn", "sparse_prediction", "sparse_pred_ignore_index",
            "cls_token_id", "sep_token_id",
        }),
        neutral={"position_embedding_type": "absolute", "layer_norm_eps": None, "reference_compile": None,
                 "repad_logits_with_grad": None},
    ),
}  # fmt: skip
