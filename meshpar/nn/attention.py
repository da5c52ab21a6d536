"""Causal self-attention with grouped queries, within documents.

Shapes: B batch, S query positions, T key positions, D embed, H heads, K kv_heads, G = H / K, h head_dim,
R norm_seq.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from meshpar.errors import ShardingError
from meshpar.nn.layers import Projection, enter, leave
from meshpar.parallel.local import varies_over, varying
from meshpar.parallel.precision import wide
from meshpar.sharding.constrain import constrain, current, manual_axes

Rotation = tuple[Float[Array, "B S 1 p"], Float[Array, "B S 1 p"]]
"""Cosines and sines [batch, seq, 1, p = h/2] of the angles by which the pairs of a head are turned."""


def rotation(positions_BS: Int[Array, "B S"], head_dim: int, theta: float, dtype: jnp.dtype) -> Rotation:
    """Rotary position embedding: the pair (i, i + h/2) is turned by position * theta^(-2i/h).

    All layers share it. Numerics: in float32 at least. Source: Su et al. 2021, arXiv:2104.09864.
    """
    pair = wide(jnp.arange(head_dim // 2, dtype=dtype))
    angle = positions_BS[..., None, None].astype(pair.dtype) * theta ** (-pair / (head_dim // 2))
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BSHh: Float[Array, "B S H h"], by: Rotation) -> Float[Array, "B S H h"]:
    """Turns the pairs of each head."""
    half, (cos, sin) = x_BSHh.shape[-1] // 2, by
    first, second = wide(x_BSHh[..., :half]), wide(x_BSHh[..., half:])
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BSHh.dtype)


def attend(
    q_BSHh: Float[Array, "B S H h"],
    k_BTKh: Float[Array, "B T K h"],
    v_BTKh: Float[Array, "B T K h"],
    segments_BS: Int[Array, "B S"],
) -> Float[Array, "B S H h"]:
    """`softmax(q k^T / sqrt(h)) v`, causal and within segments. Returns [B, S, H, h].

    Numerics: softmax in float32 at least. Memory: the scores, B H S T.
    """
    batch, seq, _, size = q_BSHh.shape
    q_BSKGh = q_BSHh.reshape(batch, seq, k_BTKh.shape[2], -1, size) * jnp.asarray(size**-0.5, q_BSHh.dtype)
    scores = wide(jnp.einsum("bskgh,btkh->bkgst", q_BSKGh, k_BTKh))
    index = jnp.arange(seq, dtype=jnp.int32)
    visible = (index[:, None] >= index) & (segments_BS[:, :, None] == segments_BS[:, None, :])
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BTKh.dtype)
    return jnp.einsum("bkgst,btkh->bskgh", weights, v_BTKh).reshape(q_BSHh.shape)


class Attention(nnx.Module):
    """`o(attend(q(x), k(x), v(x)))`, heads sharded by their rules."""

    def __init__(
        self, width: int, heads: int, kv_heads: int, head_dim: int, *,
        bias: bool, out_std: float, rngs: nnx.Rngs,
    ):  # fmt: skip
        embed, size = [("embed", width)], ("head_dim", head_dim)
        self.q = Projection(embed, [("heads", heads), size], bias=bias, rngs=rngs)
        self.k = Projection(embed, [("kv_heads", kv_heads), size], bias=bias, rngs=rngs)
        self.v = Projection(embed, [("kv_heads", kv_heads), size], bias=bias, rngs=rngs)
        self.o = Projection([("heads", heads), size], embed, bias=bias, rngs=rngs, std=out_std)
        self.group = heads // kv_heads

    def __call__(
        self, x_BRD: Float[Array, "B R D"], segments_BS: Int[Array, "B S"], by: Rotation | None = None
    ) -> Float[Array, "B R D"]:
        _check_whole_sequence()
        q, k, v = enter(x_BRD, [self.q, self.k, self.v], "heads")
        if by is not None:
            q, k = rotate(q, by), rotate(k, by)
        q = constrain(q, "batch", "seq", "heads", "head_dim")
        out = attend(q, self._for_local_heads(k, q), self._for_local_heads(v, q), segments_BS)
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
