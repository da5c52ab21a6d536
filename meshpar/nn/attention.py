"""Causal self-attention with grouped queries, within documents.

Shapes: B batch, S query positions, T key positions, D embed, H heads, K kv_heads, G = H / K, h head_dim,
R norm_seq.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from meshpar.cost.flops import HALF_MASKED
from meshpar.errors import ShardingError
from meshpar.nn.cache import CachedLayer
from meshpar.nn.layers import Projection, RMSNorm, enter, leave
from meshpar.nn.rotary import Rotation, rotate
from meshpar.parallel.context import constrain, manual_axes
from meshpar.parallel.local import varies_over, varying
from meshpar.parallel.precision import wide

Bias = Literal["none", "qkv", "all"]


def causal(segments_BS: Int[Array, "B S"], window: Int[Array, ""] | None = None) -> Bool[Array, "B S S"]:
    """Which tokens each token sees: itself, and those before it in its document."""
    index = jnp.arange(segments_BS.shape[1], dtype=jnp.int32)
    return behind(index, index, window) & (segments_BS[:, :, None] == segments_BS[:, None, :])


def behind(
    queries: Int[Array, "*B S"], keys_T: Int[Array, "T"], window: Int[Array, ""] | None
) -> Bool[Array, "*B S T"]:
    """Whether the position of a key is that of the query, or one of the `window - 1` before it."""
    distance = queries[..., None] - keys_T
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


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
    with jax.named_scope(HALF_MASKED):
        scores = wide(jnp.einsum("bskgh,btkh->bkgst", q_BSKGh, k_BTKh))
        scores = jnp.where(visible_BST[:, None, None], scores, jnp.finfo(scores.dtype).min)
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
        self, x_BRD: Float[Array, "B R D"], among: Int[Array, "B S"] | CachedLayer, by: Rotation | None = None,
        window: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B R D"], CachedLayer | None]:  # fmt: skip
        """What the tokens of x attend to, and the cache with their keys and values if there is one.

        Args:
          among: int32 [batch, seq], the segment of each token of x, of which it sees those before it; or the tokens
            that went before x.
          window: how many tokens each sees, itself the last of them; None for all.
        """
        _check_whole_sequence()
        if isinstance(among, CachedLayer):
            # A cache that each device holds whole takes keys that are typed as the same on each.
            (q,), (k, v) = enter(x_BRD, [self.q], "heads"), enter(x_BRD, [self.k, self.v], "kv_heads")
        else:
            q, k, v = enter(x_BRD, [self.q, self.k, self.v], "heads")
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if by is not None:
            q, k = rotate(q, by), rotate(k, by)
        q = constrain(q, "batch", "seq", "heads", "head_dim")
        past, keys, values, visible = _seen(among, k, v, window)
        out = attend(q, self._for_local_heads(keys, q), self._for_local_heads(values, q), visible)
        out = constrain(out, "batch", "seq", "heads", "head_dim")
        return leave(out, self.o, "heads"), past

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


def _seen(among: Int[Array, "B S"] | CachedLayer, k: jax.Array, v: jax.Array, window: Int[Array, ""] | None) -> Any:
    """The cache with these keys and values, if there is one; all keys and values; and which of them each token sees."""
    if not isinstance(among, CachedLayer):
        return None, k, v, causal(among, window)
    past = among.extend(k, v)
    slots = jnp.arange(past.keys.shape[1], dtype=jnp.int32)
    return past, past.keys, past.values, behind(past.positions, slots, window)


def _check_whole_sequence() -> None:
    if axes := manual_axes("seq"):
        sharded = f"rules.seq = {list(axes)}"
        raise ShardingError(f"{sharded}: this attention needs the whole sequence on each device; use rules.seq=[]")
