"""A masked diffusion model in NNX, as in bonsai's LLaDA: parameters are made in shards, layers get shardings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P

from tests.zoo import Zoo
from tests.zoo.parts import SEQ, VOCAB, one_hot_cross_entropy, sentences, wide

WIDTH = 32
HEADS = 8
HEAD_DIM = WIDTH // HEADS
HIDDEN = 64
LAYERS = 1

KERNEL = P("tp", "fsdp")
UP, DOWN = P("fsdp", "tp"), P("tp", "fsdp")
ACTIVATION = P("fsdp", None, "tp")
SCORES = P("fsdp", "tp")
normal = jax.nn.initializers.normal(0.1)


class ShardedLinear(nnx.Module):
    def __init__(self, n, m, sharding, rngs):
        self.kernel = nnx.Param(normal(rngs.params(), (n, m), out_sharding=sharding))
        self.bias = nnx.Param(jnp.zeros((m,), out_sharding=P("tp")))

    def __call__(self, x, out_sharding):
        return jnp.matmul(x, self.kernel[...], out_sharding=out_sharding) + self.bias[...]


class ShardedEmbedding(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Param(normal(rngs.params(), (VOCAB, WIDTH), out_sharding=P(None, "tp")))

    def __call__(self, tokens, out_sharding):
        return self.table[...].at[tokens].get(out_sharding=out_sharding)


class RMSNorm(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.zeros((WIDTH,), out_sharding=P("tp")))

    def __call__(self, x):
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * (1 + self.weight[...])


def rope(x, positions):
    frequency = 500_000.0 ** (-jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = jnp.einsum("BT,k->BTk", positions, frequency)[:, :, None, :]
    first, second = x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]
    sin, cos = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attn_norm, self.ff_norm = RMSNorm(), RMSNorm()
        self.q_proj, self.k_proj, self.v_proj, self.attn_out = (
            ShardedLinear(WIDTH, WIDTH, KERNEL, rngs) for _ in range(4)
        )
        self.ff_proj, self.up_proj = (ShardedLinear(WIDTH, HIDDEN, UP, rngs) for _ in range(2))
        self.ff_out = ShardedLinear(HIDDEN, WIDTH, DOWN, rngs)

    def __call__(self, x, positions, mask):
        normed = self.attn_norm(x)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (f(normed, ACTIVATION).reshape(*x.shape[:-1], HEADS, HEAD_DIM) for f in projections)
        q, k = rope(q, positions), rope(k, positions)
        scores = jnp.einsum("BTNH,BSNH->BNTS", q, k, out_sharding=SCORES) / HEAD_DIM**0.5
        probs = jax.nn.softmax(jnp.where(mask[:, None, None, :], scores, jnp.finfo(scores.dtype).min), axis=-1)
        attended = jnp.einsum("BNTS,BSNH->BTNH", probs, v, out_sharding=ACTIVATION)
        x = x + self.attn_out(attended.reshape(x.shape), ACTIVATION)
        normed = self.ff_norm(x)
        hidden = jax.nn.silu(self.ff_proj(normed, ACTIVATION)) * self.up_proj(normed, ACTIVATION)
        return x + self.ff_out(hidden, ACTIVATION)


class LLaDA(nnx.Module):
    def __init__(self, rngs):
        self.wte = ShardedEmbedding(rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = RMSNorm()
        self.head = ShardedLinear(WIDTH, VOCAB, UP, rngs)

    def __call__(self, tokens, valid):
        positions = jax.vmap(lambda row: jnp.arange(SEQ) - jnp.argmax(row))(valid)
        x = self.wte(tokens, ACTIVATION)
        for block in self.blocks:
            x = block(x, positions, valid)
        return self.head(self.norm(x), ACTIVATION)


def build() -> Zoo:
    def model(key):
        return LLaDA(nnx.Rngs(key))

    def init(key):
        return nnx.state(model(key), nnx.Param)

    def loss(params, batch, key):
        graph = nnx.graphdef(nnx.eval_shape(model, jax.random.key(0)))
        return one_hot_cross_entropy(nnx.merge(graph, params)(batch["tokens"], batch["tokens"] > 0), batch["targets"])

    return Zoo("explicit_llada", wide(init), loss, sentences(), axes={"tp": "tensor"})
