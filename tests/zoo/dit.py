"""A diffusion transformer in Linen: adaptive norms from time and class, classes dropped at random, rectified flow."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from tests.zoo import Zoo
from tests.zoo.parts import ATTENTION, images, mlp, wide

WIDTH = 32
CLASSES = 7
PATCH = 2
SIZE = 8


def modulate(x, shift, scale):
    return x * (1 + scale[:, None]) + shift[:, None]


def norm(name):
    return nn.LayerNorm(use_bias=False, use_scale=False, epsilon=1e-6, name=name)


class TimestepEmbedder(nn.Module):
    frequencies: int = 16

    @nn.compact
    def __call__(self, t):
        half = self.frequencies // 2
        args = t[:, None] * jnp.exp(-jnp.log(10000.0) * jnp.arange(half) / half)[None] * 1000
        x = jnp.concatenate([jnp.cos(args), jnp.sin(args)], axis=-1)
        x = nn.Dense(WIDTH, name="linear1")(x)
        return nn.Dense(WIDTH, name="linear2")(nn.silu(x))


class LabelEmbedder(nn.Module):
    dropout: float = 0.25

    @nn.compact
    def __call__(self, labels):
        drop = jax.random.bernoulli(self.make_rng("label_dropout"), self.dropout, labels.shape)
        labels = jnp.where(drop, CLASSES, labels)
        return nn.Embed(CLASSES + 1, WIDTH, name="table")(labels)


class DiTBlock(nn.Module):
    num_heads: int = 4

    @nn.compact
    def __call__(self, x, c):
        c = nn.Dense(6 * WIDTH, name="adaln")(nn.silu(c))
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = jnp.split(c, 6, axis=-1)
        y = modulate(norm("norm1")(x), shift_msa, scale_msa)
        x = x + gate_msa[:, None] * nn.MultiHeadDotProductAttention(num_heads=self.num_heads, name="attn")(y)
        y = modulate(norm("norm2")(x), shift_mlp, scale_mlp)
        y = nn.Dense(WIDTH, name="fc2")(nn.gelu(nn.Dense(4 * WIDTH, name="fc1")(y)))
        return x + gate_mlp[:, None] * y


class DiT(nn.Module):
    depth: int = 2

    @nn.compact
    def __call__(self, x, t, labels):
        n, height, width, channels = x.shape
        side = height // PATCH
        x = x.reshape(n, side, PATCH, side, PATCH, channels).transpose(0, 1, 3, 2, 4, 5)
        x = nn.Dense(WIDTH, name="x_embedder")(x.reshape(n, side * side, -1))
        x = x + self.param("pos_embed", nn.initializers.normal(0.02), (1, side * side, WIDTH), x.dtype)
        c = TimestepEmbedder(name="t_embedder")(t) + LabelEmbedder(name="y_embedder")(labels)
        for i in range(self.depth):
            x = DiTBlock(name=f"block_{i}")(x, c)
        shift, scale = jnp.split(nn.Dense(2 * WIDTH, name="final_adaln")(nn.silu(c)), 2, axis=-1)
        x = nn.Dense(PATCH * PATCH * channels, name="final")(modulate(norm("norm_final")(x), shift, scale))
        x = x.reshape(n, side, side, PATCH, PATCH, channels)
        return jnp.einsum("nhwpqc->nhpwqc", x).reshape(n, height, width, channels)


def build() -> Zoo:
    model = DiT()

    def init(key):
        keys = {"params": key, "label_dropout": key}
        return model.init(keys, jnp.ones((1, SIZE, SIZE, 4)), jnp.ones(1), jnp.ones(1, jnp.int32))["params"]

    def loss(params, batch, key):
        of_time, of_noise, of_labels = jax.random.split(key, 3)
        image = batch["image"]
        noise = jax.random.normal(of_noise, image.shape)
        t = jax.nn.sigmoid(jax.random.normal(of_time, image.shape[:1]))
        at = t[:, None, None, None]
        noisy = at * image + (1 - at) * noise
        velocity = model.apply({"params": params}, noisy, t, batch["label"], rngs={"label_dropout": of_labels})
        return jnp.mean(jnp.square(velocity - (image - noise)))

    dims = {
        "x_embedder.kernel": ("patch", "embed"),
        "pos_embed": ("patch", "patch", "embed"),
        "**linear1.kernel": ("patch", "mlp"),
        "**linear1.bias": ("mlp",),
        "**linear2.kernel": ("mlp", "embed"),
        "**table.embedding": ("vocab", "embed"),
        **ATTENTION,
        **mlp("fc1", "fc2"),
        "**adaln.kernel": ("embed", "mlp"),
        "**adaln.bias": ("mlp",),
        "final.kernel": ("embed", "patch"),
        "final.bias": ("patch",),
        "**": ("embed",),
    }
    batch = images(SIZE, 4, CLASSES)
    return Zoo("dit", wide(init), loss, batch, draws=True, dims=dims, rules={"patch": ()})
