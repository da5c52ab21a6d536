"""A mixture of experts as in GShard: two experts a token, with a capacity, by products with one-hot masks."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from tests.zoo import Zoo
from tests.zoo.parts import SEQ, VOCAB, cross_entropy, sentences, wide

LAYERS = 2
WIDTH = 32
EXPERTS = 8
CAPACITY = 3


def kernel(*names):
    return nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)


def top_2_gating(gates):
    """Masks [group, token, expert, place] that send tokens to places of experts, and weigh what comes back."""
    weights, chosen = jax.lax.top_k(gates, 2)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    first, second = (jax.nn.one_hot(chosen[..., i], EXPERTS, dtype=gates.dtype) for i in range(2))
    aux_loss = jnp.mean(jnp.mean(first, axis=1) * jnp.mean(gates, axis=1)) * EXPERTS**2
    place_in_first = jnp.cumsum(first, axis=1) - first
    place_in_second = jnp.cumsum(second, axis=1) - second + jnp.sum(first, axis=1, keepdims=True)
    combine = jnp.zeros((*gates.shape, CAPACITY), gates.dtype)
    for i, (mask, place) in enumerate([(first, place_in_first), (second, place_in_second)]):
        mask = mask * (place < CAPACITY).astype(gates.dtype)  # tokens beyond the capacity are dropped
        place = jnp.sum(place * mask, axis=-1).astype(jnp.int32)
        places = jax.nn.one_hot(place, CAPACITY, dtype=gates.dtype)
        combine += weights[..., i, None, None] * mask[..., None] * places[:, :, None, :]
    return combine, (combine > 0).astype(gates.dtype), aux_loss


class MoE(nn.Module):
    @nn.compact
    def __call__(self, x):
        gates = nn.softmax(nn.Dense(EXPERTS, use_bias=False, kernel_init=kernel("embed", "router"), name="router")(x))
        combine, dispatch, aux_loss = top_2_gating(gates)
        wi = self.param("wi", kernel("experts", "embed", "mlp"), (EXPERTS, WIDTH, 2 * WIDTH), jnp.float32)
        wo = self.param("wo", kernel("experts", "mlp", "embed"), (EXPERTS, 2 * WIDTH, WIDTH), jnp.float32)
        expert_inputs = jnp.einsum("gsec,gsm->egcm", dispatch, x)
        h = nn.relu(jnp.einsum("egcm,emh->egch", expert_inputs, wi))
        expert_outputs = jnp.einsum("egch,ehm->egcm", h, wo)
        return jnp.einsum("gsec,egcm->gsm", combine, expert_outputs), aux_loss


class Model(nn.Module):
    num_layers: int = LAYERS

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, embedding_init=kernel("vocab", "embed"), name="embedding")(tokens)
        aux_losses = []
        for i in range(self.num_layers):
            scale_init = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
            y = nn.LayerNorm(use_bias=False, scale_init=scale_init)(x)
            y, aux_loss = MoE(name=f"moe_{i}")(y)
            x = x + y
            aux_losses.append(aux_loss)
        logits = nn.Dense(VOCAB, use_bias=False, kernel_init=kernel("embed", "vocab"), name="logits")(x)
        return logits, sum(aux_losses)


def build() -> Zoo:
    model = Model(num_layers=LAYERS)

    def init(key):
        return model.init(key, jnp.ones((1, SEQ), jnp.int32))["params"]

    def loss(params, batch, key):
        logits, aux_loss = model.apply({"params": params}, batch["tokens"])
        return cross_entropy(logits, batch["targets"]) + 0.01 * aux_loss, {"aux_loss": aux_loss}

    return Zoo("gshard", wide(init), loss, sentences())
