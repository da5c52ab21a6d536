"""A Gemma-like decoder in Linen: pairs of a local and a global layer under a scan, capped scores, norms of heads."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from tests.zoo import Zoo
from tests.zoo.parts import SEQ, VOCAB, cross_entropy, sentences, wide

WIDTH = 32
HEADS = 8
KV_HEADS = 4
HEAD_DIM = 8
HIDDEN = 64
PAIRS = 2
WINDOW = 3


def kernel(*names):
    return nn.with_logical_partitioning(nn.initializers.normal(0.1), names)


class Einsum(nn.Module):
    shape: tuple[int, ...]
    names: tuple[str, ...]

    @nn.compact
    def __call__(self, equation, x):
        w = self.param("w", kernel(*self.names), self.shape, jnp.float32)
        return jnp.einsum(equation, x, w)


class RMSNorm(nn.Module):
    dim: str = "embed"

    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(nn.initializers.zeros_init(), (self.dim,))
        scale = self.param("scale", init, (x.shape[-1],), jnp.float32)
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * (1 + scale)


def rope(x, positions, max_wavelength=10_000):
    timescale = max_wavelength ** (2 * jnp.arange(HEAD_DIM // 2) / HEAD_DIM)
    angles = positions[..., None, None] / timescale
    sin, cos = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def soft_cap(x, cap):
    return jnp.tanh(x / cap) * cap


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x, positions, mask):
        q = Einsum((HEADS, WIDTH, HEAD_DIM), ("heads", "embed", "head_dim"), name="q_einsum")("BTD,NDH->BTNH", x)
        shape, names = (2, KV_HEADS, WIDTH, HEAD_DIM), ("pair", "kv_heads", "embed", "head_dim")
        k, v = Einsum(shape, names, name="kv_einsum")("BSD,CKDH->CBSKH", x)
        q, k = (rope(RMSNorm("head_dim", name=name)(y), positions) for name, y in (("q_norm", q), ("k_norm", k)))
        b, t, _, _ = q.shape
        q = q.reshape(b, t, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM) * HEAD_DIM**-0.5
        logits = soft_cap(jnp.einsum("BTKGH,BSKH->BTKGS", q, k), 50.0)
        logits = jnp.where(mask[:, :, None, None, :], logits, -2.3819763e38)
        encoded = jnp.einsum("BTKGS,BSKH->BTKGH", nn.softmax(logits, axis=-1), v).reshape(b, t, HEADS, HEAD_DIM)
        out = Einsum((HEADS, HEAD_DIM, WIDTH), ("heads", "head_dim", "embed"), name="attn_vec_einsum")
        return out("BTNH,NHD->BTD", encoded)


class FeedForward(nn.Module):
    @nn.compact
    def __call__(self, x):
        gate, up = Einsum((2, WIDTH, HIDDEN), ("pair", "embed", "mlp"), name="gating_einsum")("BTF,CFH->CBTH", x)
        return Einsum((HIDDEN, WIDTH), ("mlp", "embed"), name="linear")("BTH,HF->BTF", nn.gelu(gate) * up)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, positions, mask):
        y = Attention(name="attn")(RMSNorm(name="pre_attention_norm")(x), positions, mask)
        x = x + RMSNorm(name="post_attention_norm")(y)
        y = FeedForward(name="mlp")(RMSNorm(name="pre_ffw_norm")(x))
        return x + RMSNorm(name="post_ffw_norm")(y)


@functools.partial(nn.remat, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
class Pair(nn.Module):
    @nn.compact
    def __call__(self, x, positions, causal):
        distance = positions[:, :, None] - positions[:, None, :]
        x = Block(name="local")(x, positions, causal & (distance < WINDOW))
        return Block(name="global")(x, positions, causal), None


class Gemma(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        table = self.param("input_embedding", kernel("vocab", "embed"), (VOCAB, WIDTH), jnp.float32)
        x = table[tokens] * jnp.sqrt(WIDTH).astype(table.dtype)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        causal = positions[:, :, None] >= positions[:, None, :]
        pairs = nn.scan(
            Pair, variable_axes={"params": 0}, split_rngs={"params": True}, length=PAIRS, in_axes=nn.broadcast,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )  # fmt: skip
        x, _ = pairs(name="pairs")(x, positions, causal)
        return soft_cap(jnp.dot(RMSNorm(name="final_norm")(x), table.T), 30.0)


def build() -> Zoo:
    def init(key):
        return Gemma().init(key, jnp.ones((1, SEQ), jnp.int32))["params"]

    def loss(params, batch, key):
        return cross_entropy(Gemma().apply({"params": params}, batch["tokens"]), batch["targets"])

    return Zoo("gemma", wide(init), loss, sentences(), rules={"pair": ()})
