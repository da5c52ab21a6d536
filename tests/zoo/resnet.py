"""The ResNet of Flax's ImageNet example: batch norm, whose statistics are carried, strides, pools, weight decay."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from tests.zoo import Zoo
from tests.zoo.parts import WHOLE, accuracy, cross_entropy, images, wide

CLASSES = 8


class BottleneckResNetBlock(nn.Module):
    filters: int
    conv: Any
    norm: Any
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x):
        residual = x
        y = self.conv(self.filters, (1, 1))(x)
        y = self.norm()(y)
        y = nn.relu(y)
        y = self.conv(self.filters, (3, 3), self.strides)(y)
        y = self.norm()(y)
        y = nn.relu(y)
        y = self.conv(self.filters * 4, (1, 1))(y)
        y = self.norm(scale_init=nn.initializers.zeros_init())(y)
        if residual.shape != y.shape:
            residual = self.conv(self.filters * 4, (1, 1), self.strides, name="conv_proj")(residual)
            residual = self.norm(name="norm_proj")(residual)
        return nn.relu(residual + y)


class ResNet(nn.Module):
    stage_sizes: tuple[int, ...] = (1, 1)
    num_classes: int = CLASSES
    num_filters: int = 8

    @nn.compact
    def __call__(self, x, train=True):
        conv = partial(nn.Conv, use_bias=False)
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5)
        x = conv(self.num_filters, (7, 7), (2, 2), padding=[(3, 3), (3, 3)], name="conv_init")(x)
        x = norm(name="bn_init")(x)
        x = nn.relu(x)
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for i, block_size in enumerate(self.stage_sizes):
            for j in range(block_size):
                strides = (2, 2) if i > 0 and j == 0 else (1, 1)
                x = BottleneckResNetBlock(self.num_filters * 2**i, conv=conv, norm=norm, strides=strides)(x)
        x = jnp.mean(x, axis=(1, 2))
        return nn.Dense(self.num_classes)(x)


def build() -> Zoo:
    model = ResNet()

    def variables(key):
        return model.init(key, jnp.ones((1, 16, 16, 3)), train=False)

    def loss(params, batch, key, carried):
        variables = {"params": params, **carried}
        logits, new = model.apply(variables, batch["image"], mutable=["batch_stats"])
        kernels = [x for x in jax.tree_util.tree_leaves(params) if x.ndim > 1]
        weight_penalty = 1e-4 * 0.5 * sum(jnp.sum(x**2) for x in kernels)
        return (
            cross_entropy(logits, batch["label"]) + weight_penalty,
            {"accuracy": accuracy(logits, batch["label"])},
            new,
        )

    def first_statistics(key):
        return {"batch_stats": variables(key)["batch_stats"]}

    dims = {
        "conv_init.kernel": ("height", "width", "channels", "mlp"),
        "**conv_proj.kernel": ("height", "width", "embed", "mlp"),
        "Dense_0.kernel": ("mlp", "classes"),
        "**Conv_*.kernel": ("height", "width", "embed", "mlp"),
        "**BatchNorm_*.*": ("mlp",),
        "**norm_proj.*": ("mlp",),
        "**bn_init.*": ("mlp",),
    }
    return Zoo(
        "resnet", wide(lambda key: variables(key)["params"]), loss, images(16), carried=wide(first_statistics),
        dims=dims, rules=WHOLE | {"unnamed": ()},
    )  # fmt: skip
