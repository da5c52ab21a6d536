"""A decoder in NNX whose layers `nnx.vmap` makes and `nnx.scan` applies, with `nnx.remat`: rotary, SwiGLU, few keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from tests.zoo import Zoo
from tests.zoo.parts import VOCAB, cross_entropy, sentences, wide

WIDTH = 32
HEADS = 8
KV_HEADS = 4
HEAD_DIM = 4
LAYERS = 2


def kernel(*names):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)


def apply_rope(x, positions, max_wavelength=10_000):
    """As in Flax's Gemma."""
    fraction = 2 * jnp.arange(0, HEAD_DIM // 2) / HEAD_DIM
    angles = positions[..., None, None] / max_wavelength**fraction
    sin, cos = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
    first_half, second_half = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first_half * cos - second_half * sin, second_half * cos + first_half * sin], axis=-1)


class RMSNorm(nnx.Module):
    def __init__(self, dim: int):
        self.scale = nnx.Param(jnp.zeros(dim), out_sharding=("embed",))

    def __call__(self, x):
        variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(variance + 1e-6) * (1 + self.scale[...])


class Attention(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        def project(heads, name):
            init = kernel("embed", name, "head_dim")
            return nnx.LinearGeneral(WIDTH, (heads, HEAD_DIM), use_bias=False, kernel_init=init, rngs=rngs)

        self.q = project(HEADS, "heads")
        self.k = project(KV_HEADS, "kv_heads")
        self.v = project(KV_HEADS, "kv_heads")
        self.o = nnx.LinearGeneral(
            (HEADS, HEAD_DIM), WIDTH, axis=(-2, -1), use_bias=False, kernel_init=kernel("heads", "head_dim", "embed"),
            rngs=rngs,
        )  # fmt: skip

    def __call__(self, x, positions):
        q, k, v = apply_rope(self.q(x), positions), apply_rope(self.k(x), positions), self.v(x)
        k, v = (jnp.repeat(y, HEADS // KV_HEADS, axis=2) for y in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * HEAD_DIM**-0.5
        causal = positions[:, None, :, None] >= positions[:, None, None, :]
        weights = jax.nn.softmax(jnp.where(causal, scores, -2.3819763e38), axis=-1)
        return self.o(jnp.einsum("bnts,bsnh->btnh", weights, v))


class Layer(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.attn_norm = RMSNorm(WIDTH)
        self.attn = Attention(rngs=rngs)
        self.mlp_norm = RMSNorm(WIDTH)
        # The gate and the other half of the hidden features in one product.
        self.gate_up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, kernel_init=kernel("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, use_bias=False, kernel_init=kernel("mlp", "embed"), rngs=rngs)

    def __call__(self, x, positions):
        x = x + self.attn(self.attn_norm(x), positions)
        gate, up = jnp.split(self.gate_up(self.mlp_norm(x)), 2, axis=-1)
        return x + self.down(nnx.silu(gate) * up)


class Decoder(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        table = nnx.with_partitioning(nnx.initializers.normal(1.0), ("vocab", "embed"))
        param_dtype = jnp.result_type(float)  # `attend` computes in the dtype in which the table was made
        self.embed = nnx.Embed(VOCAB, WIDTH, param_dtype=param_dtype, embedding_init=table, rngs=rngs)

        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def layers(rngs: nnx.Rngs):
            return Layer(rngs=rngs)

        self.layers = layers(rngs)
        self.norm = RMSNorm(WIDTH)

    def __call__(self, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        @nnx.scan(in_axes=(0, nnx.Carry, None), out_axes=nnx.Carry, transform_metadata={nnx.PARTITION_NAME: "layers"})
        @nnx.remat
        def forward(layer, x, positions):
            return layer(x, positions)

        x = forward(self.layers, self.embed(tokens) * WIDTH**0.5, positions)
        return self.embed.attend(self.norm(x))


def build() -> Zoo:
    with nnx.use_eager_sharding(False):
        graph = nnx.graphdef(nnx.eval_shape(lambda: Decoder(rngs=nnx.Rngs(0))))

    def init(key):
        return nnx.state(Decoder(rngs=nnx.Rngs(key)), nnx.Param)

    def loss(params, batch, key):
        return cross_entropy(nnx.merge(graph, params)(batch["tokens"]), batch["targets"])

    return Zoo("stacked_nnx", wide(init), loss, sentences())
