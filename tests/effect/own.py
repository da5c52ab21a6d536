"""A user's own Flax models, which runs import."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
import optax

VOCAB = 320


def named(*dims):
    return nn.with_logical_partitioning(nn.initializers.lecun_normal(), dims)


class Own(nn.Module):
    width: int = 16

    @nn.compact
    def __call__(self, tokens):
        table = self.param("table", named("vocab", "embed"), (VOCAB, self.width))
        x = nn.with_logical_constraint(jnp.take(table, tokens, axis=0), ("batch", "height", "embed"))
        bias = nn.with_logical_partitioning(nn.initializers.zeros, ("mlp",))
        scale = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
        hidden = nn.RMSNorm(scale_init=scale, name="norm")(x)
        hidden = nn.Dense(32, kernel_init=named("embed", "mlp"), bias_init=bias, name="up")(hidden)
        x = x + nn.Dense(self.width, use_bias=False, kernel_init=named("mlp", "embed"), name="down")(nn.gelu(hidden))
        return nn.Dense(VOCAB, use_bias=False, kernel_init=named("embed", "vocab"), name="head")(x)


def build(width: int = 16) -> nn.Module:
    return Own(width)


def wider() -> nn.Module:
    return Own(24)


def loss(model, params, batch, key):
    logits = model.apply({"params": params}, batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch["targets"], 0)).mean()
