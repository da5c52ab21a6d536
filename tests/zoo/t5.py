"""T5 in Linen: relative positions in buckets, RMS norms, gated GELU, attention across with the padding masked."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tests.zoo import Zoo
from tests.zoo.parts import ROWS, SEQ, VOCAB, mlp, wide

WIDTH = 32
HEADS = 4
BUCKETS = 8


def relative_position_bucket(relative_position, bidirectional, num_buckets=BUCKETS, max_distance=16):
    buckets = 0
    n = -relative_position
    if bidirectional:
        num_buckets //= 2
        buckets += (n < 0).astype(np.int32) * num_buckets
        n = np.abs(n)
    else:
        n = np.maximum(n, 0)
    max_exact = num_buckets // 2
    scale = (num_buckets - max_exact) / np.log(max_distance / max_exact)
    large = max_exact + (np.log(np.maximum(n, 1) / max_exact) * scale).astype(np.int32)
    return buckets + np.where(n < max_exact, n, np.minimum(large, num_buckets - 1))


class RelativePositionBiases(nn.Module):
    bidirectional: bool

    @nn.compact
    def __call__(self, length):
        table = self.param("rel_embedding", nn.initializers.normal(1.0), (HEADS, BUCKETS), jnp.float32)
        positions = np.arange(length)
        buckets = relative_position_bucket(positions[None, :] - positions[:, None], self.bidirectional)
        one_hot = jax.nn.one_hot(buckets, BUCKETS, dtype=table.dtype)  # a product is faster than a gather on a TPU
        return jnp.einsum("hn,qkn->hqk", table, one_hot)[None]


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x, source, mask, bias=None):
        q, k, v = (
            nn.DenseGeneral((HEADS, WIDTH // HEADS), use_bias=False, name=name)(y)
            for name, y in (("query", x), ("key", source), ("value", source))
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)  # T5 does not scale them
        scores = scores if bias is None else scores + bias
        weights = nn.softmax(scores + jnp.where(mask > 0, 0.0, -1e10))
        return nn.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False, name="out")(
            jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        )


class GatedMlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        gate = nn.gelu(nn.Dense(2 * WIDTH, use_bias=False, name="wi_0")(x))
        return nn.Dense(WIDTH, use_bias=False, name="wo")(gate * nn.Dense(2 * WIDTH, use_bias=False, name="wi_1")(x))


class Stack(nn.Module):
    decodes: bool
    num_layers: int = 2

    @nn.compact
    def __call__(self, x, mask, memory=None, memory_mask=None):
        bias = RelativePositionBiases(bidirectional=not self.decodes, name="relpos_bias")(x.shape[1])
        for i in range(self.num_layers):
            y = nn.RMSNorm(name=f"attention_layer_norm_{i}")(x)
            x = x + Attention(name=f"attention_{i}")(y, y, mask, bias)
            if self.decodes:
                y = nn.RMSNorm(name=f"cross_layer_norm_{i}")(x)
                x = x + Attention(name=f"cross_{i}")(y, memory, memory_mask)
            x = x + GatedMlp(name=f"mlp_{i}")(nn.RMSNorm(name=f"mlp_layer_norm_{i}")(x))
        return nn.RMSNorm(name="final_layer_norm")(x)


class T5(nn.Module):
    @nn.compact
    def __call__(self, inputs, targets):
        embed = nn.Embed(VOCAB, WIDTH, name="token_embedder")
        padding = (inputs > 0)[:, None, None, :]
        memory = Stack(decodes=False, name="encoder")(embed(inputs), padding)
        shifted = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)))
        x = Stack(decodes=True, name="decoder")(embed(shifted), nn.make_causal_mask(targets), memory, padding)
        return embed.attend(x) / WIDTH**0.5


def build() -> Zoo:
    rng = np.random.default_rng(0)
    inputs, targets = rng.integers(1, VOCAB, (2, ROWS, SEQ), np.int32)
    for tokens in (inputs, targets):
        tokens[np.arange(SEQ) >= rng.integers(SEQ // 2, SEQ + 1, ROWS)[:, None]] = 0

    def init(key):
        return T5().init(key, inputs[:1], targets[:1])["params"]

    def loss(params, batch, key, z_loss=1e-2):
        logits = T5().apply({"params": params}, batch["inputs"], batch["targets"])
        log_z = jax.nn.logsumexp(logits, axis=-1)
        nll = log_z - jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
        weights = (batch["targets"] > 0).astype(logits.dtype)
        return jnp.sum((nll + z_loss * jnp.square(log_z)) * weights) / jnp.sum(weights)

    dims = {
        "token_embedder.embedding": ("vocab", "embed"),
        "**rel_embedding": ("heads", "unnamed"),
        "**out.kernel": ("heads", "head_dim", "embed"),
        **{f"**{name}.kernel": ("embed", "heads", "head_dim") for name in ("query", "key", "value")},
        **mlp("wi_0", "wo"),
        "**wi_1.kernel": ("embed", "mlp"),
        "**layer_norm*.scale": ("embed",),
    }
    dims = {glob: names for glob, names in dims.items() if not glob.endswith(".bias")}
    return Zoo("t5", wide(init), loss, {"inputs": inputs, "targets": targets}, dims=dims, rules={"unnamed": ()})
