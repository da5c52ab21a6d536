"""nanoGPT in NNX: queries, keys and values in one product, learned positions, a tied head, dropout with a key."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from tests.zoo import Zoo
from tests.zoo.parts import SEQ, VOCAB, cross_entropy, mlp, sentences, wide

LAYERS = 2
WIDTH = 32
HEADS = 4


class CausalSelfAttention(nnx.Module):
    def __init__(self, dropout: float, *, rngs: nnx.Rngs):
        self.c_attn = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.c_proj = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.attn_dropout = nnx.Dropout(dropout)
        self.resid_dropout = nnx.Dropout(dropout)

    def __call__(self, x, rngs):
        B, T, C = x.shape
        q, k, v = jnp.split(self.c_attn(x), 3, axis=2)
        q = q.reshape(B, T, HEADS, C // HEADS).swapaxes(1, 2)  # (B, nh, T, hs)
        k = k.reshape(B, T, HEADS, C // HEADS).swapaxes(1, 2)
        v = v.reshape(B, T, HEADS, C // HEADS).swapaxes(1, 2)
        att = (q @ k.swapaxes(-2, -1)) * (1.0 / jnp.sqrt(k.shape[-1]))
        mask = jnp.tril(jnp.ones((T, T))).reshape((1, 1, T, T))
        att = jnp.where(mask == 0.0, float("-inf"), att)
        att = self.attn_dropout(nnx.softmax(att, axis=-1), rngs=rngs)
        y = (att @ v).swapaxes(1, 2).reshape(B, T, C)
        return self.resid_dropout(self.c_proj(y), rngs=rngs)


class MLP(nnx.Module):
    def __init__(self, dropout: float, *, rngs: nnx.Rngs):
        self.c_fc = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.c_proj = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(dropout)

    def __call__(self, x, rngs):
        return self.dropout(self.c_proj(nnx.gelu(self.c_fc(x), approximate=True)), rngs=rngs)


class Block(nnx.Module):
    def __init__(self, dropout: float, *, rngs: nnx.Rngs):
        self.ln_1 = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)
        self.attn = CausalSelfAttention(dropout, rngs=rngs)
        self.ln_2 = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)
        self.mlp = MLP(dropout, rngs=rngs)

    def __call__(self, x, rngs):
        x = x + self.attn(self.ln_1(x), rngs)
        return x + self.mlp(self.ln_2(x), rngs)


class GPT(nnx.Module):
    def __init__(self, num_layers: int, dropout: float = 0.1, *, rngs: nnx.Rngs):
        param_dtype = jnp.result_type(float)  # `attend` computes in the dtype in which the table was made
        self.wte = nnx.Embed(VOCAB, WIDTH, param_dtype=param_dtype, rngs=rngs)
        self.wpe = nnx.Embed(SEQ, WIDTH, param_dtype=param_dtype, rngs=rngs)
        self.drop = nnx.Dropout(dropout)
        self.h = nnx.List([Block(dropout, rngs=rngs) for _ in range(num_layers)])
        self.ln_f = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)

    def __call__(self, idx, rngs):
        pos = jnp.arange(0, idx.shape[1])[None]
        x = self.drop(self.wte(idx) + self.wpe(pos), rngs=rngs)
        for block in self.h:
            x = block(x, rngs)
        return self.wte.attend(self.ln_f(x))


def build() -> Zoo:
    graph = nnx.graphdef(nnx.eval_shape(lambda: GPT(LAYERS, rngs=nnx.Rngs(0))))

    def init(key):
        return nnx.state(GPT(LAYERS, rngs=nnx.Rngs(key)), nnx.Param)

    def loss(params, batch, key):
        logits = nnx.merge(graph, params)(batch["tokens"], nnx.Rngs(dropout=key))
        return cross_entropy(logits, batch["targets"])

    dims = {
        "wte.embedding": ("vocab", "embed"),
        "wpe.embedding": ("positions", "embed"),
        "**c_attn.kernel": ("embed", "heads"),
        "**c_attn.bias": ("heads",),
        "**attn.c_proj.kernel": ("heads", "embed"),
        "**attn.c_proj.bias": ("embed",),
        **mlp("c_fc", "c_proj"),
        "**ln_*.*": ("embed",),
    }
    return Zoo("gpt2", wide(init), loss, sentences(), draws=True, dims=dims)
