"""Causal self-attention with grouped queries, within documents.

Shapes: B batch, S query positions, T key positions, D embed, H heads, K kv_heads, G = H / K, h head_dim,
R norm_seq.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from meshpar.errors import ShardingError
from meshpar.nn.layers import Projection, RMSNorm, enter, leave
from meshpar.nn.rotary import Rotation, rotate
from meshpar.parallel.local import varies_over, varying
from meshpar.parallel.precision import wide
from meshpar.sharding.constrain import constrain, current, manual_axes

Bias = Literal["none", "qkv", "all"]


def attend(
    q_BSHh: Float[Array, "B S H h"],
    k_BTKh: Float[Array, "B T K h"],
    v_BTKh: Float[Array, "B T K h"],
    segments_BS: Int[Array, "B S"],
    window: Int[Array, ""] | None = None,
) -> Float[Array, "B S H h"]:
    """`softmax(q k^T / sqrt(h)) v`, causal and within segments. Returns [B, S, H, h].

    Args:
      window: how many positions a query sees, its own the last of them; None for all.

    Numerics: softmax in float32 at least. Memory: the scores, B H S T.
    """
    batch, seq, _, size = q_BSHh.shape
    q_BSKGh = q_BSHh.reshape(batch, seq, k_BTKh.shape[2], -1, size) * jnp.asarray(size**-0.5, q_BSHh.dtype)
    scores = wide(jnp.einsum("bskgh,btkh->bkgst", q_BSKGh, k_BTKh))
    index = jnp.arange(seq, dtype=jnp.int32)
    visible = (index[:, None] >= index) & (segments_BS[:, :, None] == segments_BS[:, None, :])
    if window is not None:
        visible &= index[:, None] - index < window
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BTKh.dtype)
    return jnp.einsum("bkgst,btkh->bskgh", weights, v_BTKh).reshape(q_BSHh.shape)


class Attention(nnx.Module):
    """`o(attend(q(x), k(x), v(x)))`, heads sharded by their rules.

    Args:
      bias: of no projection, of q, k and v, or of all four.
      head_norm: eps of an RMSNorm over each head of q and k, before they are turned; None for no norm.
    """

    def __init__(
        self, width: int, heads: int, kv_heads: int, head_dim: int, *,
        bias: Bias, out_std: float, rngs: nnx.Rngs, head_norm: float | None = None,
    ):  # fmt: skip
        inner = bias != "none"
        embed, size = [("embed", width)], ("head_dim", head_dim)
        self.q = Projection(embed, [("heads", heads), size], bias=inner, rngs=rngs)
        self.k = Projection(embed, [("kv_heads", kv_heads), size], bias=inner, rngs=rngs)
        self.v = Projection(embed, [("kv_heads", kv_heads), size], bias=inner, rngs=rngs)
        self.o = Projection([("heads", heads), size], embed, bias=bias == "all", rngs=rngs, std=out_std)
        self.q_norm = None if head_norm is None else RMSNorm(head_dim, eps=head_norm, dim="head_dim")
        self.k_norm = None if head_norm is None else RMSNorm(head_dim, eps=head_norm, dim="head_dim")
        self.group = heads // kv_heads

    def __call__(
        self,
        x_BRD: Float[Array, "B R D"],
        segments_BS: Int[Array, "B S"],
        by: Rotation | None = None,
        window: Int[Array, ""] | None = None,
    ) -> Float[Array, "B R D"]:
        _check_whole_sequence()
        q, k, v = enter(x_BRD, [self.q, self.k, self.v], "heads")
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if by is not None:
            q, k = rotate(q, by), rotate(k, by)
        q = constrain(q, "batch", "seq", "heads", "head_dim")
        out = attend(q, self._for_local_heads(k, q), self._for_local_heads(v, q), segments_BS, window)
        out = constrain(out, "batch", "seq", "heads", "head_dim")
        return leave(out, self.o, "heads")

    def _for_local_heads(
        self, k_BTKh: Float[Array, "B T K h"], q_BSHh: Float[Array, "B S H h"]
    ) -> Float[Array, "B T L h"]:
        """The key heads of the query heads that are here, where the rules shard these and not those."""
        if manual_axes("heads") == manual_axes("kv_heads"):
            return k_BTKh
        heads = q_BSHh.shape[2]
        first = jax.lax.axis_index(manual_axes("heads")) * heads
        which = (first + jnp.arange(heads, dtype=jnp.int32)) // self.group
        return jnp.take(varying(k_BTKh, tuple(sorted(varies_over(q_BSHh)))), which, axis=2)


def _check_whole_sequence() -> None:
    how = current()
    if how and how.axes("seq"):
        sharded = f"rules.seq = {list(how.axes('seq'))}"
        raise ShardingError(f"{sharded}: this attention needs the whole sequence on each device; use rules.seq=[]")
