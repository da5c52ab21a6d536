"""A Gemma-like decoder in NNX for JAX's explicit mode, as in Flax's examples: a config shards what layers return."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests.zoo import Zoo
from tests.zoo.parts import SEQ, VOCAB, one_hot_cross_entropy, sentences, wide

WIDTH = 32
HEADS = 8
HEAD_DIM = 8
HIDDEN = 64
LAYERS = 1


SHARDINGS = {
    "emb_vd": P("tensor", "fsdp"),
    "qkv_cndh": P(None, "tensor", "fsdp", None),
    "o_nhd": P("tensor", None, "fsdp"),
    "ffw_df": P("fsdp", "tensor"),
    "ffw_fd": P("tensor", "fsdp"),
    "norm": P("tensor"),
    "act_btd": P("fsdp", None, "tensor"),
    "act_btf": P("fsdp", None, "tensor"),
    "act_cbtnh": P(None, "fsdp", None, "tensor", None),
}
"""b rows, t tokens, v vocabulary, d width, n heads, h size of a head, f hidden size of the MLP."""


def einsum(equation, shape, sharding, rngs):
    return nnx.Einsum(equation, shape, kernel_metadata={"out_sharding": sharding}, rngs=rngs)


def linear(n, m, sharding, rngs):
    return nnx.Linear(n, m, use_bias=False, kernel_metadata={"out_sharding": sharding}, rngs=rngs)


class RMSNorm(nnx.Module):
    def __init__(self, sharding, rngs):
        self.scale = nnx.Param(jnp.zeros(WIDTH), out_sharding=sharding)

    def __call__(self, x):
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * (1 + self.scale[...])


def rope(x, positions):
    timescale = 10_000 ** (2 * jnp.arange(HEAD_DIM // 2) / HEAD_DIM)
    angles = positions[..., None, None] / timescale
    sin, cos = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(nnx.Module):
    def __init__(self, shardings, rngs):
        self.shardings = shardings
        self.qkv = einsum("BTD,SNDH->SBTNH", (3, HEADS, WIDTH, HEAD_DIM), shardings.qkv_cndh, rngs)
        self.out = einsum("BTNH,NHD->BTD", (HEADS, HEAD_DIM, WIDTH), shardings.o_nhd, rngs)

    def __call__(self, x, positions, mask):
        q, k, v = self.qkv(x, out_sharding=self.shardings.act_cbtnh)
        q, k = rope(q, positions) * HEAD_DIM**-0.5, rope(k, positions)
        logits = jnp.tanh(jnp.einsum("BTNH,BSNH->BTNS", q, k) / 50.0) * 50.0
        probs = jax.nn.softmax(jnp.where(mask[:, :, None, :], logits, -2.3819763e38), axis=-1)
        return self.out(jnp.einsum("BTNS,BSNH->BTNH", probs, v), out_sharding=self.shardings.act_btd)


class FeedForward(nnx.Module):
    def __init__(self, shardings, rngs):
        self.shardings = shardings
        self.gate, self.up = (linear(WIDTH, HIDDEN, shardings.ffw_df, rngs) for _ in range(2))
        self.down = linear(HIDDEN, WIDTH, shardings.ffw_fd, rngs)

    def __call__(self, x):
        gate = nnx.gelu(self.gate(x, out_sharding=self.shardings.act_btf))
        return self.down(gate * self.up(x, out_sharding=self.shardings.act_btf), out_sharding=self.shardings.act_btd)


class Block(nnx.Module):
    def __init__(self, shardings, rngs):
        self.before_attention, self.before_mlp = (RMSNorm(shardings.norm, rngs) for _ in range(2))
        self.attention = Attention(shardings, rngs)
        self.mlp = FeedForward(shardings, rngs)

    def __call__(self, x, positions, mask):
        x = x + self.attention(self.before_attention(x), positions, mask)
        return x + self.mlp(self.before_mlp(x))


class Gemma(nnx.Module):
    def __init__(self, shardings, rngs):
        self.shardings = shardings
        metadata = {"out_sharding": shardings.emb_vd}
        self.embedder = nnx.Embed(VOCAB, WIDTH, dtype=jnp.result_type(float), embedding_metadata=metadata, rngs=rngs)
        self.layers = nnx.List([Block(shardings, rngs) for _ in range(LAYERS)])
        self.norm = RMSNorm(shardings.norm, rngs)

    def __call__(self, tokens):
        x = self.embedder(tokens, out_sharding=self.shardings.act_btd) * WIDTH**0.5
        positions = jnp.broadcast_to(jnp.arange(SEQ), tokens.shape)
        mask = positions[:, :, None] >= positions[:, None, :]
        for layer in self.layers:
            x = layer(x, positions, mask)
        logits = self.embedder.attend(self.norm(x), out_sharding=self.shardings.act_btd)
        return jnp.tanh(logits / 30.0) * 30.0


def build(**changes: P) -> Zoo:
    shardings = SimpleNamespace(**SHARDINGS | changes)
    with nnx.use_eager_sharding(False):
        graph = nnx.graphdef(nnx.eval_shape(lambda: Gemma(shardings, nnx.Rngs(0))))

    def init(key):
        return nnx.state(Gemma(shardings, nnx.Rngs(key)), nnx.Param)

    def loss(params, batch, key):
        return one_hot_cross_entropy(nnx.merge(graph, params)(batch["tokens"]), batch["targets"])

    return Zoo("explicit_gemma", wide(init), loss, sentences())
