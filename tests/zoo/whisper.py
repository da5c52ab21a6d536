"""An encoder and decoder like Whisper's, in NNX: convolutions over time, attention across, tied logits."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.zoo import Zoo
from tests.zoo.parts import ROWS, SEQ, VOCAB, cross_entropy, mlp, sentences, wide

LAYERS = 2
WIDTH = 32
HEADS = 4
MELS = 16
FRAMES = 16


def sinusoids(length, channels, max_timescale=10000):
    increment = np.log(max_timescale) / (channels // 2 - 1)
    scaled = np.arange(length)[:, None] * np.exp(-increment * np.arange(channels // 2))[None]
    return np.concatenate([np.sin(scaled), np.cos(scaled)], axis=1)


class MultiHeadAttention(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.query = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.key = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.value = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, xa=None, mask=None):
        source = x if xa is None else xa
        q, k, v = (
            y.reshape(*y.shape[:2], HEADS, -1).transpose(0, 2, 1, 3)
            for y in (self.query(x), self.key(source), self.value(source))
        )
        qk = q @ k.swapaxes(-1, -2) * (WIDTH // HEADS) ** -0.5
        if mask is not None:
            qk = qk + mask
        attended = (nnx.softmax(qk, axis=-1) @ v).transpose(0, 2, 1, 3)
        return self.out(attended.reshape(x.shape))


class ResidualAttentionBlock(nnx.Module):
    def __init__(self, cross_attention: bool = False, *, rngs: nnx.Rngs):
        self.attn = MultiHeadAttention(rngs=rngs)
        self.attn_ln = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.cross_attn = MultiHeadAttention(rngs=rngs) if cross_attention else None
        self.cross_attn_ln = nnx.LayerNorm(WIDTH, rngs=rngs) if cross_attention else None
        self.fc1 = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.fc2 = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.mlp_ln = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x, xa=None, mask=None):
        x = x + self.attn(self.attn_ln(x), mask=mask)
        if self.cross_attn is not None:
            x = x + self.cross_attn(self.cross_attn_ln(x), xa)
        return x + self.fc2(nnx.gelu(self.fc1(self.mlp_ln(x)), approximate=False))


class AudioEncoder(nnx.Module):
    def __init__(self, num_layers: int, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(MELS, WIDTH, kernel_size=3, padding=1, rngs=rngs)
        self.conv2 = nnx.Conv(WIDTH, WIDTH, kernel_size=3, strides=2, padding=1, rngs=rngs)
        self.blocks = nnx.List([ResidualAttentionBlock(rngs=rngs) for _ in range(num_layers)])
        self.ln_post = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, mel):
        x = nnx.gelu(self.conv1(mel), approximate=False)
        x = nnx.gelu(self.conv2(x), approximate=False)
        x = x + sinusoids(*x.shape[1:])
        for block in self.blocks:
            x = block(x)
        return self.ln_post(x)


class TextDecoder(nnx.Module):
    def __init__(self, num_layers: int, *, rngs: nnx.Rngs):
        param_dtype = jnp.result_type(float)  # `attend` computes in the dtype in which the table was made
        self.token_embedding = nnx.Embed(VOCAB, WIDTH, param_dtype=param_dtype, rngs=rngs)
        self.positional_embedding = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (SEQ, WIDTH)))
        self.blocks = nnx.List([ResidualAttentionBlock(True, rngs=rngs) for _ in range(num_layers)])
        self.ln = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens, xa):
        x = self.token_embedding(tokens) + self.positional_embedding[...]
        mask = jnp.triu(jnp.full((SEQ, SEQ), -jnp.inf), k=1)
        for block in self.blocks:
            x = block(x, xa, mask)
        return self.token_embedding.attend(self.ln(x))


class Whisper(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.encoder = AudioEncoder(LAYERS, rngs=rngs)
        self.decoder = TextDecoder(LAYERS, rngs=rngs)

    def __call__(self, mel, tokens):
        return self.decoder(tokens, self.encoder(mel))


def build() -> Zoo:
    graph = nnx.graphdef(nnx.eval_shape(lambda: Whisper(rngs=nnx.Rngs(0))))
    mel = np.random.default_rng(1).normal(size=(ROWS, FRAMES, MELS))

    def init(key):
        return nnx.state(Whisper(rngs=nnx.Rngs(key)), nnx.Param)

    def loss(params, batch, key):
        model = nnx.merge(graph, params)
        return cross_entropy(model(batch["mel"], batch["tokens"]), batch["targets"])

    columns = {f"**attn.{name}.kernel": ("embed", "heads") for name in ("query", "key", "value")}
    dims = {
        **columns,
        "**attn.query.bias": ("heads",),
        "**attn.value.bias": ("heads",),
        "**attn.out.kernel": ("heads", "embed"),
        **mlp("fc1", "fc2"),
        "**conv1.kernel": ("width", "mels", "embed"),
        "**conv2.kernel": ("width", "embed", "unnamed"),
        "**conv2.bias": ("unnamed",),
        "**token_embedding.embedding": ("vocab", "embed"),
        "**positional_embedding": ("positions", "embed"),
        "**": ("embed",),
    }
    rules = {"width": (), "mels": (), "unnamed": ()}
    return Zoo("whisper", wide(init), loss, sentences() | {"mel": mel}, dims=dims, rules=rules)
