"""FNet in Linen: Fourier transforms mix the tokens, after a dilated convolution and a cumulative mean."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from tests.zoo import Zoo
from tests.zoo.parts import SEQ, VOCAB, accuracy, cross_entropy, mlp, sentences, wide

WIDTH = 32
CLASSES = 4


class FourierTransform(nn.Module):
    """The real part of the transform over tokens and features."""

    @nn.compact
    def __call__(self, x):
        return jax.vmap(jnp.fft.fftn)(x).real


class EncoderBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(epsilon=1e-12, name="mixing_layer_norm")(x + FourierTransform()(x))
        y = nn.Dense(2 * WIDTH, name="intermediate")(x)
        y = nn.Dense(WIDTH, name="output")(nn.gelu(y))
        return nn.LayerNorm(epsilon=1e-12, name="output_layer_norm")(x + y)


class FNet(nn.Module):
    num_layers: int = 2

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, name="word")(tokens)
        x = x + nn.Embed(SEQ, WIDTH, name="position")(jnp.arange(tokens.shape[1])[None])
        x = nn.Conv(WIDTH, (3,), kernel_dilation=(2,), padding="CAUSAL", name="dilated")(x)
        means = jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1)[None, :, None]
        x = x + means
        for i in range(self.num_layers):
            x = EncoderBlock(name=f"encoder_{i}")(x)
        x = jnp.flip(x, axis=1)[:, 0] + x.mean(axis=1)
        x = jnp.tanh(nn.Dense(WIDTH, name="pooler")(x))
        return nn.Dense(CLASSES, name="classifier")(x)


def build() -> Zoo:
    batch = {"tokens": sentences()["tokens"]}
    batch["label"] = (batch["tokens"].sum(axis=1) % CLASSES).astype("int32")

    def init(key):
        return FNet().init(key, jnp.ones((1, SEQ), jnp.int32))["params"]

    def loss(params, batch, key):
        logits = FNet().apply({"params": params}, batch["tokens"])
        return cross_entropy(logits, batch["label"]), {"accuracy": accuracy(logits, batch["label"])}

    dims = {
        "word.embedding": ("vocab", "embed"),
        "position.embedding": ("positions", "embed"),
        "dilated.kernel": ("width", "embed", "unnamed"),
        "dilated.bias": ("unnamed",),
        **mlp("intermediate", "output"),
        "pooler.kernel": ("embed", "mlp"),
        "pooler.bias": ("mlp",),
        "classifier.kernel": ("mlp", "classes"),
        "classifier.bias": ("classes",),
        "**layer_norm.*": ("embed",),
    }
    rules = {"width": (), "classes": (), "unnamed": ()}
    return Zoo("fnet", wide(init), loss, batch, dims=dims, rules=rules)
