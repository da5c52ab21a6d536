"""The MLP-Mixer of Google's vision_transformer, in Linen."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp

from tests.zoo import Zoo
from tests.zoo.parts import WHOLE, accuracy, cross_entropy, images, wide

CLASSES = 8
LAYERS = 2


class MlpBlock(nn.Module):
    mlp_dim: int

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(self.mlp_dim)(x)
        y = nn.gelu(y)
        return nn.Dense(x.shape[-1])(y)


class MixerBlock(nn.Module):
    tokens_mlp_dim: int
    channels_mlp_dim: int

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        y = jnp.swapaxes(y, 1, 2)
        y = MlpBlock(self.tokens_mlp_dim, name="token_mixing")(y)
        y = jnp.swapaxes(y, 1, 2)
        x = x + y
        y = nn.LayerNorm()(x)
        return x + MlpBlock(self.channels_mlp_dim, name="channel_mixing")(y)


class MlpMixer(nn.Module):
    patch_size: int = 4
    num_classes: int = CLASSES
    num_blocks: int = LAYERS
    hidden_dim: int = 32
    tokens_mlp_dim: int = 24
    channels_mlp_dim: int = 64

    @nn.compact
    def __call__(self, inputs):
        size = (self.patch_size, self.patch_size)
        x = nn.Conv(self.hidden_dim, size, strides=size, name="stem")(inputs)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        for _ in range(self.num_blocks):
            x = MixerBlock(self.tokens_mlp_dim, self.channels_mlp_dim)(x)
        x = nn.LayerNorm(name="pre_head_layer_norm")(x)
        x = jnp.mean(x, axis=1)
        return nn.Dense(self.num_classes, name="head")(x)


def build() -> Zoo:
    model = MlpMixer(num_blocks=LAYERS)

    def init(key):
        return model.init(key, jnp.ones((1, 16, 16, 3)))["params"]

    def loss(params, batch, key):
        logits = model.apply({"params": params}, batch["image"])
        return cross_entropy(logits, batch["label"]), {"accuracy": accuracy(logits, batch["label"])}

    dims = {
        "stem.kernel": ("height", "width", "channels", "embed"),
        "**token_mixing.Dense_0.kernel": ("patches", "mlp"),
        "**token_mixing.Dense_1.kernel": ("mlp", "patches"),
        "**token_mixing.Dense_1.bias": ("patches",),
        "**channel_mixing.Dense_0.kernel": ("embed", "mlp"),
        "**channel_mixing.Dense_1.kernel": ("mlp", "embed"),
        "**channel_mixing.Dense_1.bias": ("embed",),
        "**Dense_0.bias": ("mlp",),
        "head.kernel": ("embed", "classes"),
        "head.bias": ("classes",),
        "**": ("embed",),
    }
    return Zoo("mixer", wide(init), loss, images(16), dims=dims, rules=WHOLE | {"patches": ()})
