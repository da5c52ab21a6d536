"""A CLIP pair: a tower for images and one for texts, contrasted over all rows."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.zoo import Zoo
from tests.zoo.parts import ATTENTION, ROWS, SEQ, VOCAB, mlp, wide

WIDTH = 32


class ResidualAttentionBlock(nn.Module):
    heads: int = 4

    @nn.compact
    def __call__(self, x, mask=None):
        y = nn.LayerNorm(name="ln_1")(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads, name="attn")(y, mask=mask)
        y = nn.Dense(4 * x.shape[-1], name="c_fc")(nn.LayerNorm(name="ln_2")(x))
        y = y * nn.sigmoid(1.702 * y)  # QuickGELU
        return x + nn.Dense(x.shape[-1], name="c_proj")(y)


class ImageTower(nn.Module):
    @nn.compact
    def __call__(self, image):
        x = nn.Conv(WIDTH, (4, 4), strides=(4, 4), use_bias=False, name="patches")(image)
        x = x.reshape(x.shape[0], -1, WIDTH)
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:], x.dtype)
        x = ResidualAttentionBlock(name="block")(nn.LayerNorm(name="ln_pre")(x))
        return nn.LayerNorm(name="ln_post")(x.mean(axis=1))


class TextTower(nn.Module):
    @nn.compact
    def __call__(self, text):
        x = nn.Embed(VOCAB, WIDTH, name="tokens")(text)
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:], x.dtype)
        x = ResidualAttentionBlock(name="block")(x, nn.make_causal_mask(text))
        x = nn.LayerNorm(name="ln_final")(x)
        return x[jnp.arange(x.shape[0]), text.argmax(axis=-1)]  # the features of the end of the text, the largest id


class CLIP(nn.Module):
    features: int = 16

    @nn.compact
    def __call__(self, image, text):
        image = nn.Dense(self.features, use_bias=False, name="image_projection")(ImageTower(name="visual")(image))
        text = nn.Dense(self.features, use_bias=False, name="text_projection")(TextTower(name="textual")(text))
        image, text = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (image, text))
        logit_scale = self.param("logit_scale", nn.initializers.constant(np.log(1 / 0.07)), (), image.dtype)
        return jnp.exp(logit_scale) * image @ text.T


def build() -> Zoo:
    rng = np.random.default_rng(0)
    text = rng.integers(1, VOCAB - 1, (ROWS, SEQ), np.int32)
    text[np.arange(ROWS), rng.integers(2, SEQ, ROWS)] = VOCAB - 1
    batch = {"image": rng.normal(size=(ROWS, 8, 8, 3)), "text": text}

    def init(key):
        return CLIP().init(key, jnp.ones((1, 8, 8, 3)), jnp.ones((1, SEQ), jnp.int32))["params"]

    def loss(params, batch, key):
        logits = CLIP().apply({"params": params}, batch["image"], batch["text"])
        labels = jnp.arange(logits.shape[0])
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels
        mean = (cross_entropy(logits, labels).mean() + cross_entropy(logits.T, labels).mean()) / 2
        return mean, {"retrieved": (jax.lax.stop_gradient(logits).argmax(-1) == labels).mean()}

    dims = {
        "**patches.kernel": ("height", "width", "channels", "embed"),
        "**tokens.embedding": ("vocab", "embed"),
        "**positions": ("positions", "embed"),
        "**_projection.kernel": ("embed", "features"),
        **ATTENTION,
        **mlp("c_fc", "c_proj"),
        "**ln_*.*": ("embed",),
    }
    rules = {"height": (), "width": (), "channels": (), "features": ()}
    return Zoo("clip", wide(init), loss, batch, dims=dims, rules=rules)
