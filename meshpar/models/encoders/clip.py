"""CLIP: a picture and a text as vectors of one space, each by a tower of its own."""

from __future__ import annotations

from collections.abc import Mapping

from meshpar.models.encoders.family import (
    EncoderFamily,
    Options,
    Wanted,
    layer_names,
    norm_of,
    normed,
    plain_layers,
    stored,
)
from meshpar.models.encoders.options import Text, TwoTowers
from meshpar.models.encoders.vit import picture_of
from meshpar.models.families.keys import Keys
from meshpar.models.foreign import Names, linear, rows, vector

LAYER = {
    "attn_norm": "layer_norm1", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "o": "self_attn.out_proj", "mlp_norm": "layer_norm2", "up": "mlp.fc1", "down": "mlp.fc2",
}  # fmt: skip
BEFORE = 2
"""The id of the end token in configs that transformers wrote before it had the right one: it means the largest id."""


def _read(keys: Mapping[str, Keys], wanted: Wanted) -> Options:
    text, picture, whole = keys["text_config"], keys["vision_config"], keys[""]
    positions = text.size("max_position_embeddings")
    end_id = text.size("eos_token_id", least=0)
    return TwoTowers(
        picture=picture_of(
            picture, is_square=True, patch_bias=False, has_embed_norm=True,
            layers=plain_layers(picture, dropout=None, attention_dropout="attention_dropout"),
        ),
        text=Text(
            vocab_size=text.size("vocab_size"), width=text.size("hidden_size"), norm=norm_of(text), has_norm=True,
            layers=plain_layers(text, dropout=None, attention_dropout="attention_dropout", is_causal=True),
            max_seq_len=positions, positions=positions, has_embed_norm=False,
        ),
        width=whole.size("projection_dim"), end_id=None if end_id == BEFORE else end_id,
    )  # fmt: skip


def _names(options: Options) -> Names:
    assert isinstance(options, TwoTowers)
    picture = options.picture
    text_embeddings, embeddings = "text_model.embeddings", "vision_model.embeddings"
    return {
        f"{text_embeddings}.token_embedding.weight": rows("text.embedding"),
        f"{text_embeddings}.position_embedding.weight": rows("text.positions"),
        **layer_names("text_model.encoder.layers", "text", LAYER),
        **normed("text_model.final_layer_norm", "text.norm"),
        f"{embeddings}.class_embedding": vector("picture.first"),
        f"{embeddings}.patch_embedding.weight": stored(
            linear("picture.patches.kernel"), picture.width, *picture.patch_shape
        ),
        f"{embeddings}.position_embedding.weight": rows("picture.positions"),
        **normed("vision_model.pre_layrnorm", "picture.embed_norm"),
        **layer_names("vision_model.encoder.layers", "picture", LAYER),
        **normed("vision_model.post_layernorm", "picture.norm"),
        "visual_projection.weight": linear("of_picture.kernel"),
        "text_projection.weight": linear("of_text.kernel"),
        "logit_scale": stored(vector("scale")),
    }


_TRAINING = frozenset({"initializer_factor", "logit_scale_init_value"})
FAMILIES = {
    "clip": EncoderFamily(
        _read, _names, "", {"pairs": "CLIPModel"}, without_effect=_TRAINING,
        neutral={"dropout": 0.0},
        parts={"text_config": "clip_text_model", "vision_config": "clip_vision_model"},
    ),
}  # fmt: skip
