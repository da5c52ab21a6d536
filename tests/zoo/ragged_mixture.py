"""A dropless mixture of experts, in Linen: tokens sorted by expert, one `ragged_dot` for each kernel."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from tests.zoo import Zoo
from tests.zoo.parts import SEQ, VOCAB, cross_entropy, sentences, wide

WIDTH = 32
HIDDEN = 48
EXPERTS = 8
PER_TOKEN = 2


def kernel(*names):
    return nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)


class SparseMoE(nn.Module):
    """As in Mixtral, with experts in the manner of MegaBlocks."""

    @nn.compact
    def __call__(self, inputs):
        x = inputs.reshape(-1, WIDTH)
        router = nn.Dense(EXPERTS, use_bias=False, kernel_init=kernel("embed", "router"), name="router")
        weights, selected = jax.lax.top_k(router(x), PER_TOKEN)
        weights = jax.nn.softmax(weights, axis=-1)
        w1 = self.param("w1", kernel("experts", "embed", "mlp"), (EXPERTS, WIDTH, HIDDEN), jnp.float32)
        w3 = self.param("w3", kernel("experts", "embed", "mlp"), (EXPERTS, WIDTH, HIDDEN), jnp.float32)
        w2 = self.param("w2", kernel("experts", "mlp", "embed"), (EXPERTS, HIDDEN, WIDTH), jnp.float32)

        flat = selected.ravel()
        order = jnp.argsort(flat)
        group_sizes = jnp.bincount(flat, length=EXPERTS)
        sorted_inputs = x[order // PER_TOKEN]
        gate = jax.lax.ragged_dot(sorted_inputs, w1, group_sizes)
        up = jax.lax.ragged_dot(sorted_inputs, w3, group_sizes)
        outputs = jax.lax.ragged_dot(nn.silu(gate) * up, w2, group_sizes)
        unsorted = outputs[jnp.argsort(order)].reshape(-1, PER_TOKEN, WIDTH)
        return jnp.einsum("tkd,tk->td", unsorted, weights).reshape(inputs.shape)


class Model(nn.Module):
    num_layers: int = 2

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, embedding_init=kernel("vocab", "embed"), name="embedding")(tokens)
        for i in range(self.num_layers):
            scale_init = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
            x = x + SparseMoE(name=f"moe_{i}")(nn.RMSNorm(scale_init=scale_init)(x))
        return nn.Dense(VOCAB, use_bias=False, kernel_init=kernel("embed", "vocab"), name="logits")(x)


def build() -> Zoo:
    def init(key):
        return Model().init(key, jnp.ones((1, SEQ), jnp.int32))["params"]

    def loss(params, batch, key):
        return cross_entropy(Model().apply({"params": params}, batch["tokens"]), batch["targets"])

    return Zoo("ragged_mixture", wide(init), loss, sentences())
