"""ViT: a picture as patches behind a class token, and a norm before each part."""

from __future__ import annotations

from meshpar.models.encoders.family import (
    EncoderFamily,
    Options,
    Wanted,
    dense,
    layer_names,
    norm_of,
    normed,
    pair,
    plain_layers,
    rate,
    stored,
)
from meshpar.models.encoders.options import Classes, EncoderOptions, Hidden, Picture, Transform
from meshpar.models.families.keys import Keys
from meshpar.models.foreign import Names, linear, rows, vector

LAYER = {
    "attn_norm": "layernorm_before", "q": "attention.attention.query", "k": "attention.attention.key",
    "v": "attention.attention.value", "o": "attention.output.dense", "mlp_norm": "layernorm_after",
    "up": "intermediate.dense", "down": "output.dense",
}  # fmt: skip


def picture_of(keys: Keys, *, is_square: bool = False, **options: object) -> Picture:
    """The tower of a config with the usual names of sizes."""
    size, patch = (pair(keys, key, is_square) for key in ("image_size", "patch_size"))
    if size[0] < patch[0] or size[1] < patch[1]:
        keys.wrong("patch_size", f"is {[*patch]}, larger than the picture, {[*size]}")
        patch = size
    return Picture(
        size=size, patch=patch, channels=keys.size("num_channels"), width=keys.size("hidden_size"), norm=norm_of(keys),
        **options,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip


def _read(keys: Keys, wanted: Wanted) -> Options:
    layers = plain_layers(
        keys, dropout="hidden_dropout_prob", attention_dropout="attention_probs_dropout_prob",
        qkv_bias=keys.flag("qkv_bias"),
    )  # fmt: skip
    tower = picture_of(keys, layers=layers, dropout=rate(keys, "hidden_dropout_prob"))
    act = keys.value("pooler_act")
    pooler = Transform(
        act="tanh" if act == "tanh" else keys.act("pooler_act"),  # pyright: ignore[reportArgumentType]
        width=keys.some_size("pooler_output_size") or tower.width,
    )
    head = Classes(num=wanted.num) if wanted.head == "classify" else Hidden(pooler=pooler)
    return EncoderOptions(tower=tower, head=head)


def _names(options: Options) -> Names:
    tower = options.tower if isinstance(options, EncoderOptions) else options.picture
    assert isinstance(tower, Picture)
    embeddings, width = "vit.embeddings", tower.width
    patches = f"{embeddings}.patch_embeddings.projection"
    return {
        f"{embeddings}.cls_token": stored(vector("tower.first"), 1, 1, width),
        f"{embeddings}.position_embeddings": stored(rows("tower.positions"), 1, tower.positions, width),
        f"{patches}.weight": stored(linear("tower.patches.kernel"), width, *tower.patch_shape),
        f"{patches}.bias": vector("tower.patches.bias"),
        **layer_names("vit.encoder.layer", "tower", LAYER),
        **normed("vit.layernorm", "tower.norm"),
        **dense("vit.pooler.dense", "head.transform.dense"),
        **dense("classifier", "head.classes"),
    }


FAMILIES = {
    "vit": EncoderFamily(
        _read, _names, "vit.", {"hidden": "ViTModel", "classify": "ViTForImageClassification"},
        others=(r"(vit\.)?pooler\..*", r"classifier\..*", r"(vit\.)?embeddings\.mask_token", r"decoder\..*"),
        without_effect=frozenset({"encoder_stride"}),
    ),
}  # fmt: skip
