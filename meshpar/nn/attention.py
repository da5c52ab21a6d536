"""Causal self-attention with grouped queries, within documents.

Shapes: B batch, S query positions, T key positions, D embed, H heads, K kv_heads, G = H / K, h head_dim,
R norm_seq.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from meshpar.errors import ShardingError
from meshpar.nn.cache import CachedLayer
from meshpar.nn.layers import Projection
from meshpar.parallel import tensor
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


def causal(segments_BS: Int[Array, "B S"]) -> Bool[Array, "B S S"]:
    """Which tokens each token sees: itself, and those before it in its document."""
    index = jnp.arange(segments_BS.shape[1], dtype=jnp.int32)
    return (index[:, None] >= index) & (segments_BS[:, :, None] == segments_BS[:, None, :])


def attend(
    q_BSHh: Float[Array, "B S H h"],
    k_BTKh: Float[Array, "B T K h"],
    v_BTKh: Float[Array, "B T K h"],
    visible_BST: Bool[Array, "B S T"],
) -> Float[Array, "B S H h"]:
    """`softmax(q k^T / sqrt(h)) v` over the keys that a query sees. Returns [B, S, H, h].

    Numerics: softmax in float32 at least. Memory: the scores, B H S T.
    """
    batch, seq, _, size = q_BSHh.shape
    q_BSKGh = q_BSHh.reshape(batch, seq, k_BTKh.shape[2], -1, size) * jnp.asarray(size**-0.5, q_BSHh.dtype)
    scores = wide(jnp.einsum("bskgh,btkh->bkgst", q_BSKGh, k_BTKh))
    scores = jnp.where(visible_BST[:, None, None], scores, jnp.finfo(scores.dtype).min)
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
        self, x_BRD: Float[Array, "B R D"], among: Int[Array, "B S"] | CachedLayer, by: Rotation | None = None
    ) -> tuple[Float[Array, "B R D"], CachedLayer | None]:
        """What the tokens of x attend to, and the cache with their keys and values if there is one.

        Args:
          among: int32 [batch, seq], the segment of each token of x, of which it sees those before it; or the tokens
            that went before x.
        """
        _check_whole_sequence()
        x_BSD = tensor.enter(x_BRD, "heads")
        # A cache that each device holds whole takes keys that are typed as the same on each.
        kv_BSD = tensor.enter(x_BRD, "kv_heads") if isinstance(among, CachedLayer) else x_BSD
        q, k, v = (p.add_bias(p(x)) for p, x in ((self.q, x_BSD), (self.k, kv_BSD), (self.v, kv_BSD)))
        if by is not None:
            q, k = rotate(q, by), rotate(k, by)
        q = constrain(q, "batch", "seq", "heads", "head_dim")
        past, keys, values, visible = _seen(among, k, v)
        out = attend(q, self._for_local_heads(keys, q), self._for_local_heads(values, q), visible)
        out = constrain(out, "batch", "seq", "heads", "head_dim")
        return self.o.add_bias(tensor.leave(self.o(out), "heads")), past

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


def _seen(among: Int[Array, "B S"] | CachedLayer, k: jax.Array, v: jax.Array) -> Any:
    """The cache with these keys and values, if there is one; all keys and values; and which of them each token sees."""
    if isinstance(among, CachedLayer):
        past = among.extend(k, v)
        return past, past.keys, past.values, past.visible
    return None, k, v, causal(among)


def _check_whole_sequence() -> None:
    how = current()
    if how and how.axes("seq"):
        sharded = f"rules.seq = {list(how.axes('seq'))}"
        raise ShardingError(f"{sharded}: this attention needs the whole sequence on each device; use rules.seq=[]")
