"""A Mamba-like language model in Linen: a causal depthwise convolution, and a selective scan by `associative_scan`."""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from tests.zoo import Zoo
from tests.zoo.parts import SEQ, VOCAB, cross_entropy, sentences, wide

LAYERS = 2
D_MODEL = 32
D_STATE = 8
D_CONV = 4
D_INNER = 2 * D_MODEL
DT_RANK = math.ceil(D_MODEL / 16)


def selective_scan(u, delta, A, B, C, D):
    """The state space h' = exp(delta A) h + delta B u, y = C h + D u, over the tokens."""
    delta_A = jnp.exp(jnp.einsum("bld,dn->bldn", delta, A))
    delta_B_u = jnp.einsum("bld,bln,bld->bldn", delta, B, u)

    def combine(left, right):
        decay_left, state_left = left
        decay_right, state_right = right
        return decay_left * decay_right, state_left * decay_right + state_right

    _, states = jax.lax.associative_scan(combine, (delta_A, delta_B_u), axis=1)
    return jnp.einsum("bldn,bln->bld", states, C) + u * D


class RMSNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],), x.dtype)
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * weight


class MambaBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        x_and_res = nn.Dense(2 * D_INNER, use_bias=False, name="in_proj")(x)
        x, res = jnp.split(x_and_res, 2, axis=-1)
        x = nn.Conv(
            D_INNER, kernel_size=(D_CONV,), feature_group_count=D_INNER, padding=[(D_CONV - 1, 0)], name="conv1d"
        )(x)
        x = nn.silu(x)
        y = self.ssm(x)
        y = y * nn.silu(res)
        return nn.Dense(D_MODEL, use_bias=False, name="out_proj")(y)

    def ssm(self, x):
        def A_log_init(key, shape, dtype):
            return jnp.log(jnp.broadcast_to(jnp.arange(1, shape[1] + 1, dtype=dtype), shape))

        A = -jnp.exp(self.param("A_log", A_log_init, (D_INNER, D_STATE), x.dtype))
        D = self.param("D", nn.initializers.ones, (D_INNER,), x.dtype)
        x_dbl = nn.Dense(DT_RANK + 2 * D_STATE, use_bias=False, name="x_proj")(x)
        delta, B, C = jnp.split(x_dbl, [DT_RANK, DT_RANK + D_STATE], axis=-1)
        delta = nn.softplus(nn.Dense(D_INNER, name="dt_proj")(delta))
        return selective_scan(x, delta, A, B, C, D)


class Mamba(nn.Module):
    num_layers: int = LAYERS

    @nn.compact
    def __call__(self, tokens):
        embedding = nn.Embed(VOCAB, D_MODEL, name="embedding")
        x = embedding(tokens)
        for i in range(self.num_layers):
            x = x + MambaBlock(name=f"mixer_{i}")(RMSNorm(name=f"norm_{i}")(x))
        return embedding.attend(RMSNorm(name="norm_f")(x))


def build() -> Zoo:
    model = Mamba(num_layers=LAYERS)

    def init(key):
        return model.init(key, jnp.ones((1, SEQ), jnp.int32))["params"]

    def loss(params, batch, key):
        return cross_entropy(model.apply({"params": params}, batch["tokens"]), batch["targets"])

    dims = {
        "embedding.embedding": ("vocab", "embed"),
        "**in_proj.kernel": ("embed", "mlp"),
        "**conv1d.kernel": ("width", "unnamed", "mlp"),
        "**conv1d.bias": ("mlp",),
        "**x_proj.kernel": ("mlp", "unnamed"),
        "**dt_proj.kernel": ("unnamed", "mlp"),
        "**dt_proj.bias": ("mlp",),
        "**A_log": ("mlp", "unnamed"),
        "**D": ("mlp",),
        "**out_proj.kernel": ("mlp", "embed"),
        "**norm_*.weight": ("embed",),
    }
    return Zoo("mamba", wide(init), loss, sentences(), dims=dims, rules={"width": (), "unnamed": ()})
