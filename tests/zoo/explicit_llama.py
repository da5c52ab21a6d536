"""Llama 3 in plain JAX, as in jax-llm-examples: dataclasses of arrays, rules from names of dims to two tensor axes."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.sharding import auto_axes, reshard

from tests.zoo import Zoo
from tests.zoo.parts import SEQ, VOCAB, sentences, wide

WIDTH = 32
HEADS = 8
KV_HEADS = 4
HEAD_DIM = 8
HIDDEN = 64
LAYERS = 1

RULES = {
    "batch": "x", "sequence": None, "embed": None, "head_dim": None, "q_heads": ("y", "z"), "kv_heads": "y",
    "ffw": ("y", "z"), "vocab_in": None, "vocab_out": ("y", "z"),
}  # fmt: skip


def l2p(*names):
    return P(*(RULES[name] for name in names))


LAYER = {
    "q": ((WIDTH, HEADS, HEAD_DIM), ("embed", "q_heads", "head_dim")),
    "k": ((WIDTH, KV_HEADS, HEAD_DIM), ("embed", "kv_heads", "head_dim")),
    "v": ((WIDTH, KV_HEADS, HEAD_DIM), ("embed", "kv_heads", "head_dim")),
    "o": ((HEADS, HEAD_DIM, WIDTH), ("q_heads", "head_dim", "embed")),
    "w_gate": ((WIDTH, HIDDEN), ("embed", "ffw")),
    "w_up": ((WIDTH, HIDDEN), ("embed", "ffw")),
    "w_down": ((HIDDEN, WIDTH), ("ffw", "embed")),
    "attn_gamma": ((WIDTH,), ("embed",)),
    "ffw_gamma": ((WIDTH,), ("embed",)),
}
ENDS = {
    "embedding": ((VOCAB, WIDTH), ("vocab_in", "embed")),
    "gamma_final": ((WIDTH,), ("embed",)),
    "lm_head": ((WIDTH, VOCAB), ("embed", "vocab_out")),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    q: jax.Array
    k: jax.Array
    v: jax.Array
    o: jax.Array
    w_gate: jax.Array
    w_up: jax.Array
    w_down: jax.Array
    attn_gamma: jax.Array
    ffw_gamma: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Weights:
    layers: list[Layer]
    embedding: jax.Array
    gamma_final: jax.Array
    lm_head: jax.Array


def made(key, arrays):
    keys = jax.random.split(key, len(arrays))
    normal = jax.nn.initializers.normal(0.1)
    return {
        name: normal(key, shape, out_sharding=l2p(*names))
        for key, (name, (shape, names)) in zip(keys, arrays.items(), strict=True)
    }


def rms_norm(x, gamma):
    return (1 + gamma) * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def rotary(x, sin, cos):
    first, second = jnp.split(x, 2, axis=-1)
    sin, cos = (wave[:, None].astype(x.dtype) for wave in (sin, cos))
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@partial(auto_axes, out_sharding=l2p("batch", "q_heads", "sequence", "head_dim"))
def attention(q, k, v):
    b, _, t, d = q.shape
    q = q.reshape(b, KV_HEADS, HEADS // KV_HEADS, t, d)
    scores = jnp.einsum("bhgtd,bhTd->bhgtT", q, k) * HEAD_DIM**-0.5
    causal = jax.lax.broadcasted_iota(jnp.int32, (t, t), 0) >= jax.lax.broadcasted_iota(jnp.int32, (t, t), 1)
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1)
    return jnp.einsum("bhgtT,bhTd->bhgtd", weights, v).reshape(b, HEADS, t, d)


def attention_block(x, layer, sin, cos):
    q, k, v = (jnp.einsum("btd,dhq->bhtq", x, w) for w in (layer.q, layer.k, layer.v))
    attended = attention(rotary(q, sin, cos), rotary(k, sin, cos), v)
    return jnp.einsum("bhtq,hqd->btd", attended, layer.o, out_sharding=l2p("batch", "sequence", "embed"))


def ffn_block(x, layer):
    gate = jax.nn.silu(jnp.einsum("btd,df->btf", x, layer.w_gate))
    up = jnp.einsum("btd,df->btf", x, layer.w_up)
    return jnp.einsum("btf,fd->btd", gate * up, layer.w_down, out_sharding=l2p("batch", "sequence", "embed"))


def forward(tokens, weights):
    x = weights.embedding.at[tokens, :].get(out_sharding=l2p("batch", "sequence", "embed"))
    positions = jnp.broadcast_to(jnp.arange(SEQ), tokens.shape)
    frequency = 500_000.0 ** (-jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = jnp.einsum("BT,k->BTk", positions, frequency, out_sharding=P(None, None, None))
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    for layer in weights.layers:
        x = x + attention_block(rms_norm(x, layer.attn_gamma), layer, sin, cos)
        x = x + ffn_block(rms_norm(x, layer.ffw_gamma), layer)
    return jnp.einsum("btd,dv->btv", rms_norm(x, weights.gamma_final), weights.lm_head)


def build() -> Zoo:
    def init(key):
        keys = jax.random.split(key, LAYERS + 1)
        layers = [Layer(**made(key, LAYER)) for key in keys[1:]]
        return Weights(layers, **made(keys[0], ENDS))

    def loss(params, batch, key):
        logits = reshard(forward(batch["tokens"], params), l2p("batch", "sequence", "vocab_out"))
        one_hot = batch["targets"][..., None] == jnp.arange(VOCAB)
        return (jax.nn.logsumexp(logits, -1) - (logits * one_hot).sum(-1)).mean()

    return Zoo("explicit_llama", wide(init), loss, sentences(), axes={"x": "data", "y": "tensor", "z": "context"})
