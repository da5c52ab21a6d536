"""The attention layer: projections, head norms and rotary positions around a core.

Shapes: B batch, S seq, R residual_seq, D embed, H heads, h head_dim.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from meshpar.nn.attention.context_parallel import across_shards
from meshpar.nn.attention.core import CachedCore, Core, Window
from meshpar.nn.attention.key_heads import KeyPlaces, key_places
from meshpar.nn.layers import Projection, RMSNorm, filled
from meshpar.nn.remat import named
from meshpar.nn.rotary import RopeAngles, apply_rope
from meshpar.parallel.context import constrain, planned
from meshpar.parallel.precision import wide

Bias = Literal["none", "qkv", "all"]
QKNorm = bool | Literal["all_heads"]
"""Whether each head of queries and keys is normalized alone, or all heads of a token together."""


class Attention(nnx.Module):
    """`o(core(q(x), k(x), v(x)))`, with grouped queries. The rules of `heads` and `kv_heads` shard the heads.

    Args:
      bias: which projections have a bias: none, q, k and v, or all four.
      qk_norm: which RMSNorm q and k have before rotary positions: none, over each head, or over all heads.
      eps: of these norms.
    """

    def __init__(
        self, width: int, heads: int, kv_heads: int, head_dim: int, *,
        bias: Bias, out_std: float, rngs: nnx.Rngs, qk_norm: QKNorm = False, eps: float = 1e-5,
    ):  # fmt: skip
        inner = bias != "none"
        embed = [("embed", width)]
        size = ("head_dim", head_dim)
        self.q = Projection(embed, [("heads", heads), size], bias=inner, rngs=rngs)
        self.k = Projection(embed, [("kv_heads", kv_heads), size], bias=inner, rngs=rngs)
        self.v = Projection(embed, [("kv_heads", kv_heads), size], bias=inner, rngs=rngs)
        self.o = Projection([("heads", heads), size], embed, bias=bias == "all", rngs=rngs, std=out_std)
        self.q_norm = head_norm(qk_norm, heads, head_dim, eps=eps, dim="heads")
        self.k_norm = head_norm(qk_norm, kv_heads, head_dim, eps=eps, dim="kv_heads")
        self.num_heads, self.num_kv_heads = heads, kv_heads

    def __call__(
        self, x_BSD: Float[Array, "B S D"], core: Core | CachedCore, positions: Int[Array, "B S"],
        segments: Int[Array, "B S"] | None = None, rope: RopeAngles | None = None, window: Window = None,
    ) -> tuple[Float[Array, "B S D"], Any]:  # fmt: skip
        """Returns the output, and the core's new cache if it has one; see `Core` for the other arguments."""
        stores = isinstance(core, CachedCore)
        q, k, v = self._projected(x_BSD, rope, None if stores else key_places(self.num_heads, self.num_kv_heads))
        q = constrain(q, "batch", "seq", "heads", "head_dim")
        q = named(q, "q")
        k = named(k, "k")
        v = named(v, "v")
        cache = None
        if stores:
            out, cache = core.with_tokens(q, k, v, positions, window)
        elif (planning := planned()) is None:
            out = core(q, k, v, segments, window)
        else:
            out = across_shards(planning, core, q, k, v, segments, window)
        out = constrain(out, "batch", "seq", "heads", "head_dim")
        return self.o(out), cache

    def _projected(
        self, x_BSD: Float[Array, "B S D"], rope: RopeAngles | None, places: KeyPlaces | None
    ) -> tuple[Float[Array, "B S H h"], Float[Array, "B S K h"], Float[Array, "B S K h"]]:
        """Queries, keys and values, rotated if there are positions to rotate by."""
        of_k, of_v, k_norm = self.k, self.v, self.k_norm
        if places:
            of_k, of_v, k_norm = places.of_modules((of_k, of_v, k_norm))
        q, k, v = self.q(x_BSD), of_k(x_BSD), of_v(x_BSD)
        if self.q_norm is not None and k_norm is not None:
            q, k = self.q_norm(q), k_norm(k)
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        return (q, places.of_heads(k), places.of_heads(v)) if places else (q, k, v)


class AllHeadsNorm(nnx.Module):
    """`x[.., H, h] -> x / rms(x over H and h) * scale[H, h]`; `dim` is the name of H.

    Numerics: in float32 at least.
    Communication: where heads are sharded, an all-reduce of one number for each token, and another one backward.
    """

    def __init__(self, heads: int, head_dim: int, *, eps: float, dim: str):
        self.scale = filled(1.0, (heads, head_dim), (dim, "head_dim"))
        self.eps = eps

    def __call__(self, x: Float[Array, "B S H h"]) -> Float[Array, "B S H h"]:
        x_wide = wide(x)
        square = jnp.square(x_wide).mean((-2, -1), keepdims=True)
        return (x_wide * jax.lax.rsqrt(square + self.eps)).astype(x.dtype) * self.scale[...]


def head_norm(kind: QKNorm, heads: int, head_dim: int, *, eps: float, dim: str) -> nnx.Module | None:
    """The norm of `heads` heads, which `dim` names; None for no norm."""
    if kind == "all_heads":
        return AllHeadsNorm(heads, head_dim, eps=eps, dim=dim)
    return RMSNorm(head_dim, eps=eps, dim="head_dim") if kind else None
