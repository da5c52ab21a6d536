"""The layers of encoders as plain NNX modules: attention to the whole row, and towers over tokens or patches.

Shapes: B batch, S seq, H heads, h head_dim.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar.models.encoders.options import Attention, Layer, Picture, Text, Transform
from meshpar.models.families.layers import ACTIVATIONS, Feedforward, Linear, Normed
from meshpar.models.families.options import PARTS, Rope
from meshpar.models.families.rotary import Angles, angles, rotated
from meshpar.nn.attention.functional import attend
from meshpar.nn.layers import filled, normal
from meshpar.parallel.precision import wide

Turns = dict[Rope, Angles]


def dropped(x: jax.Array, rate: float, rngs: nnx.Rngs | None) -> jax.Array:
    """Dropout; without `rngs`, as in an evaluation, `x` itself."""
    if rngs is None or not rate:
        return x
    is_kept = jax.random.bernoulli(rngs.dropout(), 1 - rate, x.shape)
    return jnp.where(is_kept, x / (1 - rate), jnp.zeros_like(x))


class SelfAttention(nnx.Module):
    """`x[B, S, embed] -> [B, S, embed]`."""

    def __init__(self, width: int, options: Attention, *, rngs: nnx.Rngs):
        self.options = options
        embed, heads, head = ("embed", width), ("heads", options.heads), ("head_dim", options.head_dim)
        self.q, self.k, self.v = (Linear([embed], [heads, head], bias=options.qkv_bias, rngs=rngs) for _ in "qkv")
        self.o = Linear([heads, head], [embed], bias=options.o_bias, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array | None, turns: Turns, rngs: nnx.Rngs | None) -> jax.Array:
        options = self.options
        q, k, v = self.q(x), self.k(x), self.v(x)
        if options.rope is not None:
            q, k = (rotated(options.rope, one, turns[options.rope]) for one in (q, k))
        if options.reach is None and (rngs is None or not options.dropout):
            return self.o(attend(q, k, v, causal=options.is_causal, valid=mask))
        return self.o(_attended(q, k, v, _allowed(options, mask, x.shape[1]), options.dropout, rngs))


def _allowed(options: Attention, mask: jax.Array | None, length: int) -> jax.Array:
    """Which keys a query attends to, bool [B or 1, S, S]."""
    places = jnp.arange(length)
    behind = places[:, None] - places
    allowed = jnp.ones_like(behind, bool) if options.reach is None else jnp.abs(behind) <= options.reach
    if options.is_causal:
        allowed &= behind >= 0
    return allowed[None] if mask is None else allowed[None] & mask[:, None, :]


def _attended(
    q: jax.Array, k: jax.Array, v: jax.Array, allowed: jax.Array, rate: float, rngs: nnx.Rngs | None
) -> jax.Array:
    """Attention by its formula, whose weights may be dropped. Memory: the scores of whole rows, [B, H, S, S]."""
    scores = wide(jnp.einsum("bshd,bthd->bhst", q, k)) * q.shape[-1] ** -0.5
    scores = jnp.where(allowed[:, None], scores, jnp.finfo(scores.dtype).min)
    weights = dropped(jax.nn.softmax(scores), rate, rngs).astype(v.dtype)
    return jnp.einsum("bhst,bthd->bshd", weights, v)


class Block(nnx.Module):
    """One layer."""

    def __init__(self, width: int, options: Layer, norm: partial[Normed], *, rngs: nnx.Rngs):
        self.options = options
        self.attn = SelfAttention(width, options.attention, rngs=rngs)
        self.mlp = Feedforward(width, options.mlp, rngs=rngs)
        self.attn_norm = norm() if options.has_attn_norm else None
        self.mlp_norm = norm()

    def __call__(self, x: jax.Array, mask: jax.Array | None, turns: Turns, rngs: nnx.Rngs | None) -> jax.Array:
        options = self.options
        before = x if options.is_normed_after or self.attn_norm is None else self.attn_norm(x)
        rate = options.dropout if options.attn_dropout is None else options.attn_dropout
        x = x + dropped(self.attn(before, mask, turns, rngs), rate, rngs)
        if options.is_normed_after and self.attn_norm is not None:
            x = self.attn_norm(x)
        inner = self.mlp.inner(x if options.is_normed_after else self.mlp_norm(x))
        x = x + dropped(self.mlp.down(dropped(inner, options.inner_dropout, rngs)), options.dropout, rngs)
        return self.mlp_norm(x) if options.is_normed_after else x


class TextTower(nnx.Module):
    """`tokens -> hidden [B, S, embed]`."""

    def __init__(self, options: Text, *, rngs: nnx.Rngs):
        self.options = options
        width = options.width
        norm = partial(Normed, options.norm, ("embed", width))
        self.embedding = normal(rngs, (options.vocab_size, width), 0.02, ("vocab", "embed"))
        table = (options.positions, width)
        self.positions = normal(rngs, table, 0.02, ("positions", "embed")) if options.positions else None
        self.types = normal(rngs, (options.types, width), 0.02, (PARTS, "embed")) if options.types else None
        self.embed_norm = norm() if options.has_embed_norm else None
        self.layers = nnx.List(Block(width, one, norm, rngs=rngs) for one in options.layers)
        self.norm = norm() if options.has_norm else None

    def __call__(self, tokens: jax.Array, mask: jax.Array, types: jax.Array | None, rngs: nnx.Rngs | None) -> jax.Array:
        """Args: see `Tokens` in `encoders.model`; `mask` is complete."""
        options = self.options
        x = self.embedding[...][tokens]
        places = self._places(tokens)
        if self.types is not None:
            x = x + self.types[...][jnp.zeros_like(tokens) if types is None else types]
        if self.positions is not None:
            x = x + self.positions[...][places]
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        x = dropped(x, options.dropout, rngs)
        ropes = {one.attention.rope for one in options.layers if one.attention.rope}
        turns = {rope: angles(rope, places, jnp.asarray(tokens.shape[1]), x.dtype) for rope in ropes}
        for block in self.layers:
            x = block(x, mask, turns, rngs)
        return x if self.norm is None else self.norm(x)

    def _places(self, tokens: jax.Array) -> jax.Array:
        pad_id = self.options.pad_id
        if not self.options.counts_tokens or pad_id is None:
            return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        is_token = (tokens != pad_id).astype(jnp.int32)
        return jnp.cumsum(is_token, axis=1, dtype=jnp.int32) * is_token + pad_id


class PictureTower(nnx.Module):
    """`image [B, height, width, channels] -> hidden [B, 1 + patches, embed]`."""

    def __init__(self, options: Picture, *, rngs: nnx.Rngs):
        self.options = options
        embed = ("embed", options.width)
        norm = partial(Normed, options.norm, embed)
        patch = (PARTS, options.channels * options.patch[0] * options.patch[1])
        self.patches = Linear([patch], [embed], bias=options.patch_bias, rngs=rngs)
        self.first = normal(rngs, (options.width,), 0.02, ("embed",))
        self.positions = normal(rngs, (options.positions, options.width), 0.02, ("positions", "embed"))
        self.embed_norm = norm() if options.has_embed_norm else None
        self.layers = nnx.List(Block(options.width, one, norm, rngs=rngs) for one in options.layers)
        self.norm = norm()

    def __call__(self, image: jax.Array, rngs: nnx.Rngs | None) -> jax.Array:
        options = self.options
        x = self.patches(_patches(image, options).astype(self.positions[...].dtype))
        first = jnp.broadcast_to(self.first[...].astype(x.dtype), (x.shape[0], 1, x.shape[-1]))
        x = jnp.concatenate([first, x], axis=1) + self.positions[...]
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        x = dropped(x, options.dropout, rngs)
        for block in self.layers:
            x = block(x, None, {}, rngs)
        return self.norm(x)


def _patches(image: jax.Array, options: Picture) -> jax.Array:
    """[B, height, width, channels] -> [B, patches, channels * height * width of a patch].

    Raises:
      ValueError: the picture has another size.
    """
    if image.shape[1:] != (*options.size, options.channels):
        raise ValueError(f"a picture of this model is {[*options.size, options.channels]}, not {[*image.shape[1:]]}")
    (rows, columns), (height, width) = options.grid, options.patch
    cut = image[:, : rows * height, : columns * width]
    x = cut.reshape(-1, rows, height, columns, width, options.channels)
    return x.transpose(0, 1, 3, 5, 2, 4).reshape(x.shape[0], rows * columns, -1)


class Transformed(nnx.Module):
    """See `Transform`."""

    def __init__(self, width: int, options: Transform, *, rngs: nnx.Rngs):
        self.act = jnp.tanh if options.act == "tanh" else ACTIVATIONS[options.act]
        out = (PARTS, options.width)
        self.dense = Linear([("embed", width)], [out], bias=options.bias, rngs=rngs)
        self.norm = Normed(options.norm, out) if options.norm else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.act(self.dense(x))
        return y if self.norm is None else self.norm(y)


def constant(value: float) -> nnx.Param:
    """A trained number."""
    return filled(value, (), ())
