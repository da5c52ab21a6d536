"""BERT and RoBERTa: learned positions, token types, and a norm after each sum. RoBERTa's positions count tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

from meshpar.models.encoders.family import (
    EncoderFamily,
    Options,
    Wanted,
    dense,
    layer_names,
    norm_of,
    normed,
    plain_layers,
    rate,
)
from meshpar.models.encoders.options import Classes, EncoderOptions, Head, Hidden, Pairs, Text, Transform, Vocabulary
from meshpar.models.families.keys import Keys
from meshpar.models.foreign import Names, rows, vector

LAYER = {
    "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value", "o": "attention.output.dense",
    "attn_norm": "attention.output.LayerNorm", "up": "intermediate.dense", "down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}  # fmt: skip


def _tower(keys: Keys, counts_tokens: bool) -> Text:
    positions, pad_id = keys.size("max_position_embeddings"), keys.value("pad_token_id")
    if counts_tokens and (not isinstance(pad_id, int) or isinstance(pad_id, bool) or not 0 <= pad_id < positions - 1):
        keys.wrong("pad_token_id", f"is {pad_id!r}, and positions begin after it: a number below {positions - 1}")
        pad_id = 0
    layers = plain_layers(
        keys, dropout="hidden_dropout_prob", attention_dropout="attention_probs_dropout_prob", is_normed_after=True
    )
    return Text(
        vocab_size=keys.size("vocab_size"), width=keys.size("hidden_size"), layers=layers, norm=norm_of(keys),
        max_seq_len=positions - (pad_id + 1 if counts_tokens else 0), positions=positions, pad_id=pad_id,
        counts_tokens=counts_tokens, types=keys.size("type_vocab_size"), dropout=rate(keys, "hidden_dropout_prob"),
    )  # fmt: skip


def _classifier_dropout(keys: Keys) -> float:
    return rate(keys, "hidden_dropout_prob" if keys.value("classifier_dropout") is None else "classifier_dropout")


def _read(keys: Keys, wanted: Wanted, is_roberta: bool = False) -> Options:
    tower = _tower(keys, counts_tokens=is_roberta)
    return EncoderOptions(tower=tower, head=_head(keys, tower, wanted, is_roberta))


def _head(keys: Keys, tower: Text, wanted: Wanted, is_roberta: bool) -> Head:
    dropout = _classifier_dropout(keys)
    pooler = Transform(act="tanh", width=tower.width)
    keys.value("tie_word_embeddings")
    if wanted.head == "masked_tokens":
        keys.only("tie_word_embeddings", True, "the output projection is the embedding here; tie_word_embeddings: true")
        act: Any = "gelu" if is_roberta else keys.act()
        return Vocabulary(transform=Transform(act=act, width=tower.width, norm=tower.norm))
    if wanted.head == "classify":
        input_dropout = dropout if is_roberta else 0.0
        return Classes(num=wanted.num, transform=pooler, dropout=dropout, input_dropout=input_dropout)
    return Pairs(pooling=wanted.pooling) if wanted.head == "pairs" else Hidden(pooler=pooler)


def _tower_names(prefix: str) -> Names:
    embeddings = f"{prefix}.embeddings"
    return {
        f"{embeddings}.word_embeddings.weight": rows("tower.embedding"),
        f"{embeddings}.position_embeddings.weight": rows("tower.positions"),
        f"{embeddings}.token_type_embeddings.weight": rows("tower.types"),
        **normed(f"{embeddings}.LayerNorm", "tower.embed_norm"),
        **layer_names(f"{prefix}.encoder.layer", "tower", LAYER),
    }


def _bert_names(options: Options) -> Names:
    assert isinstance(options, EncoderOptions)
    found = _tower_names("bert")
    if isinstance(options.head, Vocabulary):
        predictions = "cls.predictions"
        return found | {
            f"{predictions}.bias": vector("head.bias"),
            **dense(f"{predictions}.transform.dense", "head.transform.dense"),
            **normed(f"{predictions}.transform.LayerNorm", "head.transform.norm"),
        }
    return found | dense("bert.pooler.dense", "head.transform.dense") | dense("classifier", "head.classes")


def _roberta_names(options: Options) -> Names:
    assert isinstance(options, EncoderOptions)
    found = _tower_names("roberta")
    if isinstance(options.head, Vocabulary):
        head = dense("lm_head.dense", "head.transform.dense")
        return (
            found | {"lm_head.bias": vector("head.bias")} | head | normed("lm_head.layer_norm", "head.transform.norm")
        )
    if isinstance(options.head, Classes):
        return found | dense("classifier.dense", "head.transform.dense") | dense("classifier.out_proj", "head.classes")
    return found | dense("roberta.pooler.dense", "head.transform.dense")


PUBLISHED = {"position_embedding_type": "absolute"}
FAMILIES = {
    "bert": EncoderFamily(
        _read, _bert_names, "bert.",
        {"hidden": "BertModel", "masked_tokens": "BertForMaskedLM", "classify": "BertForSequenceClassification"},
        like={"BertForPreTraining": "masked_tokens"},
        others=(r"cls\..*", r"(bert\.)?pooler\..*", r"classifier\..*"), neutral=PUBLISHED,
    ),
    "roberta": EncoderFamily(
        partial(_read, is_roberta=True), _roberta_names, "roberta.",
        {"hidden": "RobertaModel", "masked_tokens": "RobertaForMaskedLM",
         "classify": "RobertaForSequenceClassification"},
        others=(r"lm_head\..*", r"(roberta\.)?pooler\..*", r"classifier\..*"), neutral=PUBLISHED,
    ),
}  # fmt: skip
