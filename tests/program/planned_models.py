"""Plain Flax models whose layouts are planned: an encoder with one answer a row, and an encoder with a decoder."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
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


class Mixture(nn.Module):
    """GShard's experts, by products with one-hot masks."""

    width: int = 64
    experts: int = 8

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, self.width, name="embedding")(tokens)
        gates = nn.softmax(nn.Dense(self.experts, use_bias=False, name="router")(x))
        chosen = nn.one_hot(gates.argmax(-1), self.experts)
        place = jnp.where(chosen > 0, jnp.cumsum(chosen, axis=1) - 1, -1).astype(int)
        sent = nn.one_hot(place, tokens.shape[1] // 4)  # [group, token, expert, place]
        up = self.param("up", nn.initializers.lecun_normal(), (self.experts, self.width, 4 * self.width))
        down = self.param("down", nn.initializers.lecun_normal(), (self.experts, 4 * self.width, self.width))
        hidden = nn.gelu(jnp.einsum("egpm,emh->egph", jnp.einsum("gtep,gtm->egpm", sent, x), up))
        back = jnp.einsum("gtep,egpm->gtm", sent * gates[..., None], jnp.einsum("egph,ehm->egpm", hidden, down))
        return nn.Dense(16, name="head")(nn.LayerNorm()(x + back).mean(1))


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


class ViT(nn.Module):
    width: int = 64
    depth: int = 12
    patch: int = 4

    @nn.compact
    def __call__(self, image):
        rows, columns = (size // self.patch for size in image.shape[1:3])
        x = image.reshape(-1, rows, self.patch, columns, self.patch, image.shape[3]).swapaxes(2, 3)
        x = nn.Dense(self.width, name="patches")(x.reshape(len(image), rows * columns, -1))
        x = x + self.param("position", nn.initializers.normal(0.5), (rows * columns, self.width))
        x, _ = stack(self.width, self.depth, "encoder")(x, x)
        return nn.Dense(16, name="head")(nn.LayerNorm()(x).mean(1))


def pictures(split="train"):
    """64 pictures of 32 x 32 pixels, of one of 16 kinds."""
    draw = np.random.default_rng(0)
    return {"image": draw.normal(size=(64, 32, 32, 3)).astype(np.float32), "label": draw.integers(0, 16, 64)}


def vit():
    return ViT()


def encoder():
    return Encoder()


def translator():
    return Translator()


def mixture():
    return Mixture()


def classes(model, params, batch, key):
    logits = model.apply({"params": params}, batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 0] % 16).mean()


def translation(model, params, batch, key):
    logits = model.apply({"params": params}, batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.split(batch["tokens"], 2, axis=1)[1]).mean()


def dims(*stacks):
    """The names of the dims of the stacks' products."""
    if stacks == ("experts",):
        products = {"up": ["experts", "embed", "mlp"], "down": ["experts", "mlp", "embed"]}
        return products | {"router.kernel": ["embed", "router"], "embedding.embedding": ["vocab", "embed"]}
    found = {}
    for name in {*stacks} - {"pictures"}:
        for attention in ("attention", "cross") if name == "decoder" else ("attention",):
            for one in ("query", "key", "value"):
                found[f"{name}.{attention}.{one}.kernel"] = ["layers", "embed", "heads", "head_dim"]
                found[f"{name}.{attention}.{one}.bias"] = ["layers", "heads", "head_dim"]
            found[f"{name}.{attention}.out.kernel"] = ["layers", "heads", "head_dim", "embed"]
        found[f"{name}.up.kernel"] = ["layers", "embed", "mlp"]
        found[f"{name}.up.bias"] = ["layers", "mlp"]
        found[f"{name}.down.kernel"] = ["layers", "mlp", "embed"]
    if "pictures" in stacks:
        return found
    return found | {
        "embedding.embedding": ["vocab", "embed"],
        "head.kernel": ["embed", "vocab"],
        "head.bias": ["vocab"],
    }
