"""ConvNeXt in Linen: depthwise convolutions, layer scale, blocks that are dropped at random, and mixed rows."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from tests.zoo import Zoo
from tests.zoo.parts import images, wide

CLASSES = 8


class Block(nn.Module):
    dim: int
    drop_path: float = 0.2

    @nn.compact
    def __call__(self, x):
        y = nn.Conv(self.dim, (7, 7), feature_group_count=self.dim, name="dwconv")(x)
        y = nn.LayerNorm(epsilon=1e-6, name="norm")(y)
        y = nn.Dense(4 * self.dim, name="pwconv1")(y)
        y = nn.Dense(self.dim, name="pwconv2")(nn.gelu(y))
        y = self.param("gamma", nn.initializers.constant(0.1), (self.dim,), y.dtype) * y
        keep = 1 - self.drop_path
        mask = jax.random.bernoulli(self.make_rng("drop_path"), keep, (x.shape[0], 1, 1, 1))
        return x + y * mask / keep


class ConvNeXt(nn.Module):
    depths: tuple[int, ...] = (1, 2)
    dims: tuple[int, ...] = (16, 32)

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.dims[0], (4, 4), strides=(4, 4), padding="VALID", name="stem")(x)
        x = nn.LayerNorm(epsilon=1e-6, name="stem_norm")(x)
        for i, (depth, dim) in enumerate(zip(self.depths, self.dims, strict=True)):
            if i > 0:
                x = nn.LayerNorm(epsilon=1e-6, name=f"downsample{i}_norm")(x)
                x = nn.Conv(dim, (2, 2), strides=(2, 2), padding="VALID", name=f"downsample{i}")(x)
            for j in range(depth):
                x = Block(dim, name=f"stage{i}_block{j}")(x)
        x = nn.LayerNorm(epsilon=1e-6, name="head_norm")(x.mean(axis=(1, 2)))
        return nn.Dense(CLASSES, name="head")(x)


def mixup(key, image, label):
    """Mixes each row with the one that is as far from the end: rows of other devices."""
    weight = jax.random.beta(key, 0.8, 0.8, dtype=image.dtype)
    return (weight * x + (1 - weight) * x[::-1] for x in (image, label))


def build() -> Zoo:
    def init(key):
        return ConvNeXt().init({"params": key, "drop_path": key}, jnp.ones((1, 16, 16, 3)))["params"]

    def loss(params, batch, key):
        of_mixup, of_drop_path = jax.random.split(key)
        label = jax.nn.one_hot(batch["label"], CLASSES, dtype=batch["image"].dtype)
        image, label = mixup(of_mixup, batch["image"], label)
        logits = ConvNeXt().apply({"params": params}, image, rngs={"drop_path": of_drop_path})
        return -jnp.mean(jnp.sum(label * nn.log_softmax(logits), axis=-1))

    dims = {
        "stem.kernel": ("height", "width", "channels", "embed"),
        "**dwconv.kernel": ("height", "width", "channels", "embed"),
        "downsample1.kernel": ("height", "width", "embed", "unnamed"),
        "downsample1.bias": ("unnamed",),
        "**pwconv1.kernel": ("embed", "mlp"),
        "**pwconv1.bias": ("mlp",),
        "**pwconv2.kernel": ("mlp", "embed"),
        "head.kernel": ("embed", "classes"),
        "head.bias": ("classes",),
        "**": ("embed",),
    }
    rules = {"height": (), "width": (), "channels": (), "classes": (), "unnamed": ()}
    return Zoo("convnext", wide(init), loss, images(16, 3, CLASSES), draws=True, dims=dims, rules=rules)
