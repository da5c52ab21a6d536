"""Causal models that decode: by a collection in Linen, by variables in NNX, by two methods, and one that cannot."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from tests.zoo.parts import VOCAB

WIDTH = 16
HEADS = 4
HEAD_DIM = WIDTH // HEADS
LENGTH = 24
"""Positions of the learned embedding."""


def kernel(*names):
    return nn.with_logical_partitioning(nn.initializers.normal(0.3), names)


class Positions(nn.Module):
    """Learned positions, as in Flax's lm1b: with a cache, one row of the table at a time."""

    decode: bool = False

    @nn.compact
    def __call__(self, x):
        table = self.param("table", kernel("positions", "embed"), (LENGTH, WIDTH))
        if not self.decode:
            return x + table[: x.shape[1]]
        is_initialized = self.has_variable("cache", "index")
        index = self.variable("cache", "index", lambda: jnp.array(0, jnp.int32))
        if not is_initialized:
            return x + table[: x.shape[1]]
        index.value = index.value + 1
        return x + jax.lax.dynamic_slice_in_dim(table, index.value - 1, 1)


class LinenDecoder(nn.Module):
    """The pattern of Flax's lm1b."""

    decode: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, embedding_init=kernel("vocab", "embed"))(tokens)
        x = Positions(self.decode, name="positions")(x)
        mask = None if self.decode else nn.make_causal_mask(tokens)
        y = nn.LayerNorm(use_bias=False, name="norm")(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, decode=self.decode, name="attention", use_bias=False)(
            y, mask=mask
        )
        x = x + nn.Dense(WIDTH, use_bias=False, name="down")(nn.gelu(nn.Dense(32, use_bias=False, name="up")(x)))
        return nn.Dense(VOCAB, use_bias=False, kernel_init=kernel("embed", "vocab"), name="head")(x)


class NnxDecoder(nnx.Module):
    """Without positions, so that its attention is all that a cache has to know."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, use_bias=False, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) * 8
        mask = None if self.attention.decode else nnx.make_causal_mask(tokens)
        return self.head(x + self.attention(x, mask=mask))


class Windowed(nn.Module):
    """A mean over the last tokens, with two methods of its own to decode; its cache is a ring of embeddings."""

    window: int = 3

    def setup(self):
        self.table = self.param("table", kernel("vocab", "embed"), (VOCAB, WIDTH))
        self.head = nn.Dense(VOCAB, kernel_init=kernel("embed", "vocab"), use_bias=False)

    def __call__(self, tokens):
        x = self.table[tokens]
        padded = jnp.pad(x, ((0, 0), (self.window - 1, 0), (0, 0)))
        return self.head(jnp.tanh(sum(padded[:, i : i + x.shape[1]] for i in range(self.window)) * 3))

    def init_cache(self, batch_size, length):
        return {"ring": jnp.zeros((batch_size, self.window, WIDTH)), "end": jnp.zeros((batch_size,), jnp.int32)}

    def decode(self, tokens, cache):
        at = cache["end"] % self.window
        ring = jax.vmap(lambda ring, i, x: ring.at[i].set(x))(cache["ring"], at, self.table[tokens[:, 0]])
        return self.head(jnp.tanh(ring.sum(1, keepdims=True) * 3)), {"ring": ring, "end": cache["end"] + 1}


DIMS = {
    "**norm.scale": ("embed",),
    "attention.query.kernel": ("embed", "heads", "head_dim"), "attention.key.kernel": ("embed", "heads", "head_dim"),
    "attention.value.kernel": ("embed", "heads", "head_dim"), "attention.out.kernel": ("heads", "head_dim", "embed"),
    "up.kernel": ("embed", "mlp"), "down.kernel": ("mlp", "embed"),
}  # fmt: skip
NNX_DIMS = {
    **{name: dims for name, dims in DIMS.items() if name.startswith("attention")},
    "embed.embedding": ("vocab", "embed"), "head.kernel": ("embed", "vocab"),
}  # fmt: skip


def linen() -> tuple[Any, Any, Any]:
    """(module, parameters, names of those dims that the module does not name)."""
    model = LinenDecoder()
    params = nn.meta.unbox(model.init(jax.random.key(0), jnp.ones((1, LENGTH), jnp.int32)))["params"]
    return model, params, {**DIMS, "Embed_0.embedding": ("vocab", "embed")}


def own_methods() -> tuple[Any, Any, Any]:
    model = Windowed()
    params = nn.meta.unbox(model.init(jax.random.key(0), jnp.ones((1, 4), jnp.int32)))["params"]
    return model, params, {}


def in_nnx() -> tuple[Any, Any, Any]:
    return NnxDecoder(nnx.Rngs(0)), None, NNX_DIMS


DECODERS = {"linen": linen, "nnx": in_nnx, "own_methods": own_methods}
