"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). Its cache holds small vectors, not keys and values."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar.models.families.attention import Cache, Tokens, appended, attended, visible
from meshpar.models.families.layers import Linear, Normed
from meshpar.models.families.options import Latent
from meshpar.models.families.rotary import rotated
from meshpar.nn.attention.functional import attend


class LatentAttention(nnx.Module):
    """`x[B, S, embed] -> [B, S, embed]`."""

    def __init__(self, width: int, options: Latent, *, rngs: nnx.Rngs):
        self.options = options
        linear = partial(Linear, rngs=rngs)
        embed, heads = ("embed", width), ("heads", options.heads)
        of_query = ("head_dim", options.nope_dim + options.rope.dim)
        rank = ("rank", options.q_rank or 0)
        self.q = None if options.q_rank else linear([embed], [heads, of_query])
        self.q_a = linear([embed], [rank], bias=options.bias) if options.q_rank else None
        self.q_a_norm = Normed(options.norm, rank) if options.q_rank else None
        self.q_b = linear([rank], [heads, of_query]) if options.q_rank else None
        self.kv_a = linear([embed], [("rank", options.kv_rank + options.rope.dim)], bias=options.bias)
        self.kv_a_norm = Normed(options.norm, ("rank", options.kv_rank))
        self.kv_b = linear([("rank", options.kv_rank)], [heads, ("head_dim", options.nope_dim + options.value_dim)])
        self.o = linear([heads, ("head_dim", options.value_dim)], [embed], bias=options.bias)

    def __call__(self, x: jax.Array, tokens: Tokens, cache: Cache | None) -> tuple[jax.Array, Cache | None]:
        options = self.options
        turn = partial(rotated, options.rope, by=tokens.angles[options.rope])
        q = self._queries(x)
        q = jnp.concatenate([q[..., : options.nope_dim], turn(q[..., options.nope_dim :])], axis=-1)
        both = self.kv_a(x)
        small = self.kv_a_norm(both[..., : options.kv_rank])
        turned = turn(both[..., None, options.kv_rank :])[..., 0, :]
        if cache is not None:
            cache = appended(cache, tokens, small=small, turned=turned)
            small, turned = cache["small"], cache["turned"]
        made = self.kv_b(small)
        shared = jnp.broadcast_to(turned[..., None, :], (*made.shape[:-1], turned.shape[-1]))
        k = jnp.concatenate([made[..., : options.nope_dim], shared], axis=-1)
        return self.o(self._attended(q, k, made[..., options.nope_dim :], tokens)), cache

    def _queries(self, x: jax.Array) -> jax.Array:
        if self.q is not None:
            return self.q(x)
        assert self.q_a is not None and self.q_b is not None and self.q_a_norm is not None
        return self.q_b(self.q_a_norm(self.q_a(x)))

    def _attended(self, q: jax.Array, k: jax.Array, v: jax.Array, tokens: Tokens) -> jax.Array:
        if tokens.end is not None or v.shape[-1] > k.shape[-1]:
            return attended(q, k, v, visible(tokens, k.shape[1], None)[0], scale=self.options.scale)
        wider = [(0, 0)] * 3 + [(0, k.shape[-1] - v.shape[-1])]
        out = attend(q, k, jnp.pad(v, wider), segments=tokens.segments, scale=self.options.scale)
        return out[..., : v.shape[-1]]

    def empty(self, batch_size: int, length: int, dtype: Any) -> Cache:
        sizes = {"small": self.options.kv_rank, "turned": self.options.rope.dim}
        return {name: jnp.zeros((batch_size, length, size), dtype) for name, size in sizes.items()}
