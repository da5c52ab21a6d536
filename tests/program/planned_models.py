"""Plain Flax models whose layouts are planned: an encoder with one answer a row, and an encoder with a decoder."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
import optax

VOCAB = 256


class Block(nn.Module):
    width: int
    reads_memory: bool = False

    @nn.compact
    def __call__(self, x, memory):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=8, name="attention")(y, y)
        if self.reads_memory:
            x = x + nn.MultiHeadDotProductAttention(num_heads=8, name="cross")(nn.LayerNorm()(x), memory)
        y = nn.gelu(nn.Dense(4 * self.width, name="up")(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width, name="down")(y), None


def stack(width, depth, name, reads_memory=False):
    every = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "in_axes": nn.broadcast}
    return nn.scan(nn.remat(Block), length=depth, **every)(width, reads_memory, name=name)


class Encoder(nn.Module):
    width: int = 64
    depth: int = 4

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, self.width, name="embedding")(tokens)
        x, _ = stack(self.width, self.depth, "encoder")(x, x)
        return nn.Dense(16, name="head")(nn.LayerNorm()(x).mean(1))


class Translator(nn.Module):
    width: int = 64
    depth: int = 4

    @nn.compact
    def __call__(self, tokens):
        embedding = nn.Embed(VOCAB, self.width, name="embedding")
        x, y = map(embedding, jnp.split(tokens, 2, axis=1))
        x, _ = stack(self.width, self.depth, "encoder")(x, x)
        y, _ = stack(self.width, self.depth, "decoder", reads_memory=True)(y, x)
        return nn.Dense(VOCAB, name="head")(nn.LayerNorm()(y))


def encoder():
    return Encoder()


def translator():
    return Translator()


def classes(model, params, batch, key):
    logits = model.apply({"params": params}, batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 0] % 16).mean()


def translation(model, params, batch, key):
    logits = model.apply({"params": params}, batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.split(batch["tokens"], 2, axis=1)[1]).mean()


def dims(*stacks):
    """The names of the dims of the stacks' products."""
    found = {}
    for name in stacks:
        for attention in ("attention", "cross") if name == "decoder" else ("attention",):
            for one in ("query", "key", "value"):
                found[f"{name}.{attention}.{one}.kernel"] = ["layers", "embed", "heads", "head_dim"]
                found[f"{name}.{attention}.{one}.bias"] = ["layers", "heads", "head_dim"]
            found[f"{name}.{attention}.out.kernel"] = ["layers", "heads", "head_dim", "embed"]
        found[f"{name}.up.kernel"] = ["layers", "embed", "mlp"]
        found[f"{name}.up.bias"] = ["layers", "mlp"]
        found[f"{name}.down.kernel"] = ["layers", "mlp", "embed"]
    return found | {
        "embedding.embedding": ["vocab", "embed"],
        "head.kernel": ["embed", "vocab"],
        "head.bias": ["vocab"],
    }
