"""A vision transformer as big_vision has it: a class token, learned positions, blocks under `nn.scan(nn.remat)`."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp

from tests.zoo import Zoo
from tests.zoo.parts import ATTENTION, WHOLE, accuracy, cross_entropy, images, mlp, stacked, wide

WIDTH = 32
CLASSES = 8
LAYERS = 2


class MlpBlock(nn.Module):
    mlp_dim: int
    dropout: float

    @nn.compact
    def __call__(self, x, deterministic=True):
        inits = {"kernel_init": nn.initializers.xavier_uniform(), "bias_init": nn.initializers.normal(stddev=1e-6)}
        d = x.shape[-1]
        x = nn.Dense(self.mlp_dim, **inits)(x)
        x = nn.gelu(x)
        x = nn.Dropout(rate=self.dropout)(x, deterministic)
        return nn.Dense(d, **inits)(x)


class Encoder1DBlock(nn.Module):
    mlp_dim: int = 64
    num_heads: int = 4
    dropout: float = 0.1

    @nn.compact
    def __call__(self, x, deterministic=True):
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(
            num_heads=self.num_heads, kernel_init=nn.initializers.xavier_uniform(), deterministic=deterministic
        )(y, y)
        y = nn.Dropout(rate=self.dropout)(y, deterministic)
        x = x + y
        y = nn.LayerNorm()(x)
        y = MlpBlock(self.mlp_dim, self.dropout)(y, deterministic)
        y = nn.Dropout(rate=self.dropout)(y, deterministic)
        return x + y, None


class ViT(nn.Module):
    depth: int = LAYERS
    patch_size: tuple[int, int] = (4, 4)
    dropout: float = 0.1

    @nn.compact
    def __call__(self, image, train=False):
        x = nn.Conv(WIDTH, self.patch_size, strides=self.patch_size, padding="VALID", name="embedding")(image)
        n, h, w, c = x.shape
        x = jnp.reshape(x, [n, h * w, c])
        x = x + self.param("pos_embedding", nn.initializers.normal(stddev=1 / c**0.5), (1, h * w, c), x.dtype)
        cls = self.param("cls", nn.initializers.normal(0.02), (1, 1, c), x.dtype)
        x = jnp.concatenate([jnp.tile(cls, [n, 1, 1]), x], axis=1)
        x = nn.Dropout(rate=self.dropout)(x, not train)
        block = nn.remat(Encoder1DBlock, prevent_cse=False, static_argnums=(2,))
        x, _ = nn.scan(
            block, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, in_axes=nn.broadcast,
            length=self.depth,
        )(name="encoderblock")(x, not train)  # fmt: skip
        x = nn.LayerNorm(name="encoder_norm")(x)
        return nn.Dense(CLASSES, name="head")(x[:, 0])


def build() -> Zoo:
    model = ViT(depth=LAYERS)

    def init(key):
        return model.init(key, jnp.ones((1, 16, 16, 3)))["params"]

    def loss(params, batch, key):
        logits = model.apply({"params": params}, batch["image"], train=True, rngs={"dropout": key})
        return cross_entropy(logits, batch["label"]), {"accuracy": accuracy(logits, batch["label"])}

    dims = {
        "embedding.kernel": ("height", "width", "channels", "embed"),
        "embedding.bias": ("embed",),
        "cls": ("channels", "channels", "embed"),
        "pos_embedding": ("channels", "patches", "embed"),
        **stacked(ATTENTION | mlp("Dense_0", "Dense_1") | {"**LayerNorm_*.*": ("embed",)}),
        "encoder_norm.*": ("embed",),
        "head.kernel": ("embed", "classes"),
        "head.bias": ("classes",),
    }
    return Zoo("vit", wide(init), loss, images(16), draws=True, dims=dims, rules=WHOLE | {"patches": ()})
