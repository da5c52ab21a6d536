"""The attention layer: projections, head norms and rotary positions around a core.

Shapes: B batch, S seq, R residual_seq, D embed.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from flax import nnx
from jaxtyping import Array, Float, Int

from meshpar.nn.attention.context_parallel import across_shards
from meshpar.nn.attention.core import Core, Window, local_key_heads
from meshpar.nn.attention.head_norm import QKNorm, head_norm
from meshpar.nn.layers import Projection, column_parallel, row_parallel
from meshpar.nn.remat import named
from meshpar.nn.rotary import RopeAngles, apply_rope
from meshpar.nn.supported import Sharding, Supported
from meshpar.parallel.context import constrain
from meshpar.parallel.linear import Input

Bias = Literal["none", "qkv", "all"]


class Attention(nnx.Module):
    """`o(core(q(x), k(x), v(x)))`, with grouped queries. The rules of `heads` and `kv_heads` shard the heads.

    Args:
      bias: which projections have a bias: none, q, k and v, or all four.
      qk_norm: which RMSNorm q and k have before rotary positions: none, over each head, or over all heads.
      eps: of these norms.
    """

    sharding: ClassVar[Sharding] = {
        **Projection.sharding,
        "kv_heads": Supported(same_as="heads"),
        "head_dim": Supported(partition=False, why="attention needs whole heads"),
    }

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

    def __call__(
        self, x_BRD: Input, core: Core, positions: Int[Array, "B S"],
        segments: Int[Array, "B S"] | None = None, rope: RopeAngles | None = None, window: Window = None,
    ) -> tuple[Float[Array, "B R D"], Any]:  # fmt: skip
        """Returns the output and the core's new cache; see `Core` for the other arguments."""
        if core.has_cache:
            # If key heads are replicated, keys in the cache must not vary over the axes of the query heads.
            (q,) = column_parallel(x_BRD, [self.q], "heads")
            k, v = column_parallel(x_BRD, [self.k, self.v], "kv_heads")
        else:
            q, k, v = column_parallel(x_BRD, [self.q, self.k, self.v], "heads")
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        if rope is not None:
            q = apply_rope(q, rope)
            k = apply_rope(k, rope)
        q = constrain(q, "batch", "seq", "heads", "head_dim")
        if not core.has_cache:
            k = local_key_heads(k, q)
            v = local_key_heads(v, q)
        q = named(q, "q")
        k = named(k, "k")
        v = named(v, "v")
        out, cache = across_shards(core, q, k, v, positions, segments, window)
        out = constrain(out, "batch", "seq", "heads", "head_dim")
        return row_parallel(out, self.o, "heads"), cache
