"""The decoder of the families as a plain NNX module: `tokens -> logits`, and one token at a time with a cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar.models.families.attention import Cache, SelfAttention, Tokens
from meshpar.models.families.experts import Mixture
from meshpar.models.families.latent import LatentAttention
from meshpar.models.families.layers import Bias, Feedforward, Linear, Normed, capped
from meshpar.models.families.options import MLP, Attention, DecoderOptions, Layer, Norm
from meshpar.models.families.rotary import angles
from meshpar.nn.layers import normal


class Block(nnx.Module):
    """One layer."""

    def __init__(self, width: int, options: Layer, norm: Norm, *, rngs: nnx.Rngs):
        self.style, self.residual_scale = options.style, options.residual_scale
        of_attention = SelfAttention if isinstance(options.attention, Attention) else LatentAttention
        self.attn = of_attention(width, options.attention, rngs=rngs)  # pyright: ignore[reportArgumentType]
        of_mlp = Feedforward if isinstance(options.mlp, MLP) else Mixture
        self.mlp = of_mlp(width, options.mlp, rngs=rngs)  # pyright: ignore[reportArgumentType]
        embed = ("embed", width)
        self.attn_in = Normed(norm, embed) if "attn_in" in options.norms else None
        self.attn_out = Normed(norm, embed) if "attn_out" in options.norms else None
        self.mlp_in = Normed(norm, embed) if "mlp_in" in options.norms else None
        self.mlp_out = Normed(norm, embed) if "mlp_out" in options.norms else None

    def __call__(self, x: jax.Array, tokens: Tokens, cache: Cache | None) -> tuple[jax.Array, Cache | None]:
        if self.style == "after":
            made, cache = self.attn(x, tokens, cache)
            x = _normed(self.attn_out, x + made)
            return _normed(self.mlp_out, x + self.mlp(x)), cache
        before = _normed(self.attn_in, x)
        made, cache = self.attn(before, tokens, cache)
        made = _normed(self.attn_out, made)
        if self.style == "parallel":
            read = before if self.mlp_in is None else self.mlp_in(x)
            return x + made + _normed(self.mlp_out, self.mlp(read)), cache
        x = x + made * self.residual_scale
        made = _normed(self.mlp_out, self.mlp(_normed(self.mlp_in, x)))
        return x + made * self.residual_scale, cache


def _normed(norm: Normed | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


class FamilyDecoder(nnx.Module):
    """A decoder with the options of a family.

    Its methods `init_cache` and `decode` are those by which `generate` and `serve` use it.
    """

    def __init__(self, options: DecoderOptions, *, rngs: nnx.Rngs):
        self.options = options
        embed = ("embed", options.width)
        self.embedding = normal(rngs, (options.vocab_size, options.width), 1.0, ("vocab", "embed"))
        shape = (options.positions, options.width)
        self.positions = normal(rngs, shape, 0.02, ("positions", "embed")) if options.positions else None
        self.embed_norm = Normed(options.norm, embed) if options.has_embed_norm else None
        self.layers = nnx.List(Block(options.width, one, options.norm, rngs=rngs) for one in options.layers)
        self.norm = Normed(options.norm, embed) if options.has_norm else None
        vocab = ("vocab", options.vocab_size)
        if options.is_tied:
            self.head = Bias(vocab) if options.head_bias else None
        else:
            self.head = Linear([embed], [vocab], bias=options.head_bias, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, segments: jax.Array | None = None, positions: jax.Array | None = None
    ) -> jax.Array:
        """The logits after each token.

        Args:
          tokens: int32 [batch, seq].
          segments: the document of each token; default: each row is one.
          positions: of each token in its document.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        return self._computed(tokens, positions, segments, None, None)[0]

    def init_cache(self, batch_size: int, length: int) -> dict[str, Any]:
        """An empty cache for rows of up to `length` tokens."""
        dtype = self.embedding[...].dtype
        layers = [block.attn.empty(batch_size, length, dtype) for block in self.layers]
        return {"layers": layers, "end": jnp.zeros((batch_size,), jnp.int32)}

    def decode(self, tokens: jax.Array, cache: dict[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
        """(int32 [batch, 1] tokens, cache of those before) -> (logits [batch, 1, vocab], the cache with these)."""
        end = cache["end"]
        logits, layers = self._computed(tokens, end[:, None], None, end, cache["layers"])
        return logits, {"layers": layers, "end": end + 1}

    def _computed(
        self, tokens: jax.Array, positions: jax.Array, segments: jax.Array | None, end: jax.Array | None,
        caches: list[Cache] | None,
    ) -> tuple[jax.Array, list[Cache | None]]:  # fmt: skip
        options = self.options
        table = self.embedding[...]
        x = table[tokens] * jnp.asarray(options.embed_scale, table.dtype)
        if self.positions is not None:
            x = x + self.positions[...][positions + options.position_offset]
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        longest = positions.max() + 1 if caches is None else _capacity(caches)
        ropes = {one.attention.rope for one in options.layers} - {None}
        turns = {rope: angles(rope, positions, longest, x.dtype) for rope in ropes if rope}
        about = Tokens(positions, segments, end, turns)
        new: list[Cache | None] = []
        for block, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            x, cache = block(x, about, cache)
            new.append(cache)
        if self.norm is not None:
            x = self.norm(x)
        logits = jnp.einsum("bsd,vd->bsv", x, table) if options.is_tied else x
        if self.head is not None:
            logits = self.head(logits)
        return capped(logits * jnp.asarray(options.logit_scale, logits.dtype), options.cap), new


def _capacity(caches: list[Cache]) -> jax.Array:
    """The longest row of a cache. All of its tokens are rotated as those of such a row, the first ones too."""
    return jnp.array(jax.tree.leaves(caches)[0].shape[1], jnp.int32)
