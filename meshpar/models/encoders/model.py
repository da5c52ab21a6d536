"""Encoders as plain NNX modules: a tower with a head, and CLIP's two towers."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar.models.encoders.layers import PictureTower, TextTower, Transformed, constant, dropped
from meshpar.models.encoders.options import (
    Classes,
    EncoderOptions,
    Hidden,
    Pairs,
    Picture,
    Text,
    TwoTowers,
    Vocabulary,
)
from meshpar.models.families.layers import Linear
from meshpar.models.families.options import PARTS
from meshpar.nn.layers import filled


class Encoded(NamedTuple):
    """The hidden state of each token [B, S, embed], and the vector of the pooler, if there is one."""

    hidden: jax.Array
    pooled: jax.Array | None


def pooled(hidden: jax.Array, mask: jax.Array | None, how: Literal["cls", "mean", "max"]) -> jax.Array:
    """One vector for each row, [B, embed]: that of the first token, or the mean or largest over the row's tokens."""
    if how == "cls":
        return hidden[:, 0]
    is_token = jnp.ones(hidden.shape[:2], bool) if mask is None else mask
    if how == "max":
        return jnp.where(is_token[..., None], hidden, jnp.finfo(hidden.dtype).min).max(1)
    weights = is_token.astype(hidden.dtype)
    return jnp.einsum("bs,bse->be", weights, hidden) / jnp.maximum(weights.sum(1, keepdims=True), 1e-9)


class OfHidden(nnx.Module):
    """See `Hidden`."""

    def __init__(self, tower: Text | Picture, options: Hidden, *, rngs: nnx.Rngs):
        self.transform = Transformed(tower.width, options.pooler, rngs=rngs) if options.pooler else None

    def __call__(self, hidden: jax.Array, mask: jax.Array | None, table: jax.Array | None, rngs: Any) -> Encoded:
        return Encoded(hidden, None if self.transform is None else self.transform(hidden[:, 0]))


class OfVocabulary(nnx.Module):
    """See `Vocabulary`."""

    def __init__(self, tower: Text | Picture, options: Vocabulary, *, rngs: nnx.Rngs):
        assert isinstance(tower, Text)
        self.transform = Transformed(tower.width, options.transform, rngs=rngs)
        self.bias = filled(0.0, (tower.vocab_size,), ("vocab",)) if options.bias else None

    def __call__(self, hidden: jax.Array, mask: jax.Array | None, table: jax.Array | None, rngs: Any) -> jax.Array:
        logits = jnp.einsum("bse,ve->bsv", self.transform(hidden), table)
        return logits if self.bias is None else logits + self.bias[...]


class OfClasses(nnx.Module):
    """See `Classes`."""

    def __init__(self, tower: Text | Picture, options: Classes, *, rngs: nnx.Rngs):
        self.options = options
        self.transform = Transformed(tower.width, options.transform, rngs=rngs) if options.transform else None
        width = options.transform.width if options.transform else tower.width
        self.classes = Linear([("embed", width)], [(PARTS, options.num)], bias=True, rngs=rngs)

    def __call__(self, hidden: jax.Array, mask: jax.Array | None, table: jax.Array | None, rngs: Any) -> jax.Array:
        x = dropped(pooled(hidden, mask, self.options.pooling), self.options.input_dropout, rngs)
        x = x if self.transform is None else self.transform(x)
        return self.classes(dropped(x, self.options.dropout, rngs))


HEADS: dict[type, Any] = {Hidden: OfHidden, Vocabulary: OfVocabulary, Classes: OfClasses}


class TextEncoder(nnx.Module):
    """A tower over tokens and a head."""

    def __init__(self, options: EncoderOptions, *, rngs: nnx.Rngs):
        assert isinstance(options.tower, Text)
        self.pad_id = options.tower.pad_id
        self.tower = TextTower(options.tower, rngs=rngs)
        self.head = HEADS[type(options.head)](options.tower, options.head, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, mask: jax.Array | None = None, types: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Any:  # fmt: skip
        """What the head makes of each row: `Encoded`, logits [B, S, vocab], or logits [B, classes].

        Args:
          tokens: int32 [B, S].
          mask: which of them are tokens; default: all but those that fill rows.
          types: of each token, by which the two texts of a pair differ; default: 0.
          rngs: for dropout; None in an evaluation.
        """
        mask = _mask(tokens, mask, self.pad_id)
        hidden = self.tower(tokens, mask, types, rngs)
        return self.head(hidden, mask, self.tower.embedding[...], rngs)


class TextPairs(nnx.Module):
    """One tower over both texts of a pair."""

    def __init__(self, options: EncoderOptions, *, rngs: nnx.Rngs):
        assert isinstance(options.tower, Text) and isinstance(options.head, Pairs)
        self.pad_id = options.tower.pad_id
        self.pooling: Literal["cls", "mean", "max"] = options.head.pooling
        self.tower = TextTower(options.tower, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, others: jax.Array, rngs: nnx.Rngs | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """The vectors [B, embed] of the texts `tokens` and `others`, int32 [B, S] each."""
        return self._vectors(tokens, rngs), self._vectors(others, rngs)

    def _vectors(self, tokens: jax.Array, rngs: nnx.Rngs | None) -> jax.Array:
        mask = _mask(tokens, None, self.pad_id)
        return pooled(self.tower(tokens, mask, None, rngs), mask, self.pooling)


def _mask(tokens: jax.Array, mask: jax.Array | None, pad_id: int | None) -> jax.Array:
    if mask is not None:
        return mask.astype(bool)
    return jnp.ones_like(tokens, bool) if pad_id is None else tokens != pad_id


class PictureEncoder(nnx.Module):
    """A tower over the patches of a picture, and a head."""

    def __init__(self, options: EncoderOptions, *, rngs: nnx.Rngs):
        assert isinstance(options.tower, Picture)
        self.tower = PictureTower(options.tower, rngs=rngs)
        self.head = HEADS[type(options.head)](options.tower, options.head, rngs=rngs)

    def __call__(self, image: jax.Array, rngs: nnx.Rngs | None = None) -> Any:
        """What the head makes of pictures [B, height, width, channels]."""
        return self.head(self.tower(image, rngs), None, None, rngs)


class CLIP(nnx.Module):
    """A picture and a text as vectors of one space. Source: arXiv:2103.00020."""

    def __init__(self, options: TwoTowers, *, rngs: nnx.Rngs):
        self.options = options
        self.picture = PictureTower(options.picture, rngs=rngs)
        self.text = TextTower(options.text, rngs=rngs)
        projection = partial(Linear, outs=[(PARTS, options.width)], rngs=rngs)
        self.of_picture = projection([("embed", options.picture.width)])
        self.of_text = projection([("embed", options.text.width)])
        self.scale = constant(2.6592)

    def __call__(
        self, image: jax.Array, tokens: jax.Array, mask: jax.Array | None = None, rngs: nnx.Rngs | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The vectors [B, width] of pictures and of texts, and the factor of their products.

        Args:
          image: [B, height, width, channels].
          tokens: int32 [B, S], each row with the token that ends it.
          mask: which of them are tokens; default: all. What follows the end changes nothing: attention is causal.
        """
        picture = self.of_picture(self.picture(image, rngs)[:, 0])
        hidden = self.text(tokens, jnp.ones_like(tokens, bool) if mask is None else mask.astype(bool), None, rngs)
        end_id = self.options.end_id
        end = jnp.argmax(tokens if end_id is None else tokens == end_id, axis=1)
        is_end = jax.nn.one_hot(end, tokens.shape[1], dtype=hidden.dtype)
        text = self.of_text(jnp.einsum("bs,bse->be", is_end, hidden))
        return picture, text, jnp.exp(self.scale[...])


def encoder(options: EncoderOptions | TwoTowers, *, rngs: nnx.Rngs) -> nnx.Module:
    """The module of a model's options."""
    if isinstance(options, TwoTowers):
        return CLIP(options, rngs=rngs)
    if isinstance(options.tower, Picture):
        return PictureEncoder(options, rngs=rngs)
    return (TextPairs if isinstance(options.head, Pairs) else TextEncoder)(options, rngs=rngs)
