"""Llama in plain Linen: RMSNorm, rotary positions, grouped queries, SwiGLU, its layers under `nn.scan`."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from tests.zoo import Zoo
from tests.zoo.parts import SEQ, VOCAB, cross_entropy, sentences, wide

WIDTH = 32
HEADS = 8
KV_HEADS = 4
HEAD_DIM = WIDTH // HEADS
HIDDEN = 64
LAYERS = 2


def kernel(*names):
    return nn.with_logical_partitioning(nn.initializers.normal(0.02), names)


def rotary(x, theta=10000.0):
    """Rotates the halves of each head by the token's position."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    sin, cos = (wave(angles)[:, None, :].astype(x.dtype) for wave in (jnp.sin, jnp.cos))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class RMSNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(nn.initializers.ones_init(), ("embed",))
        scale = self.param("scale", init, (x.shape[-1],), x.dtype)
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-5) * scale


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        batch, length, width = x.shape

        def project(heads, name, dim):
            init = kernel("embed", dim, "head_dim")
            return nn.DenseGeneral((heads, HEAD_DIM), use_bias=False, kernel_init=init, name=name)(x)

        q = rotary(project(HEADS, "q", "heads"))
        k = rotary(project(KV_HEADS, "k", "kv_heads"))
        v = project(KV_HEADS, "v", "kv_heads")
        q = q.reshape(batch, length, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
        scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k) / HEAD_DIM**0.5
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min))
        attended = jnp.einsum("bkgqs,bskd->bqkgd", weights, v).reshape(batch, length, HEADS, HEAD_DIM)
        init = kernel("heads", "head_dim", "embed")
        return nn.DenseGeneral(width, axis=(-2, -1), use_bias=False, kernel_init=init, name="o")(attended)


class SwiGLU(nn.Module):
    @nn.compact
    def __call__(self, x):
        gate = nn.Dense(HIDDEN, use_bias=False, kernel_init=kernel("embed", "mlp"), name="gate")(x)
        up = nn.Dense(HIDDEN, use_bias=False, kernel_init=kernel("embed", "mlp"), name="up")(x)
        return nn.Dense(WIDTH, use_bias=False, kernel_init=kernel("mlp", "embed"), name="down")(nn.silu(gate) * up)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = x + Attention(name="attn")(RMSNorm(name="attn_norm")(x))
        return x + SwiGLU(name="mlp")(RMSNorm(name="mlp_norm")(x)), None


class Llama(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, embedding_init=kernel("vocab", "embed"), name="embedding")(tokens)
        blocks = nn.scan(
            Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )  # fmt: skip
        x, _ = blocks(name="blocks")(x, None)
        x = RMSNorm(name="norm")(x)
        return nn.Dense(VOCAB, use_bias=False, kernel_init=kernel("embed", "vocab"), name="head")(x)


def build() -> Zoo:
    def init(key):
        return Llama().init(key, jnp.ones((1, SEQ), jnp.int32))["params"]

    def loss(params, batch, key):
        return cross_entropy(Llama().apply({"params": params}, batch["tokens"]), batch["targets"])

    return Zoo("llama", wide(init), loss, sentences())
