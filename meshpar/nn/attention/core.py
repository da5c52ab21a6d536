"""What attention is, the interface of the cores that compute it, and what they share.

Shapes: B batch, S query positions, T key positions, H heads, K kv_heads, G = H / K, h head_dim.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from meshpar.parallel.context import current

Window = Int[Array, ""] | int | None
"""How many tokens a query attends to, including its own; None for all up to its own. An array if layers differ."""


def causal_window(queries: Int[Array, "*B S"], keys_T: Int[Array, "T"], window: Window) -> Bool[Array, "*B S T"]:
    """Which keys a query attends to: its own position, and the `window - 1` positions before it."""
    distance = queries[..., None] - keys_T
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


@runtime_checkable
class Core(Protocol):
    """Computes attention of projected queries to projected keys.

    A core names its result `attn`, and names the statistics that its backward needs, see `nn.remat.Activation`.

    Args:
      q: [batch, seq, heads, head_dim], local shards in the manual lowering.
      k, v: [batch, seq, kv_heads, head_dim]: the key heads of these query heads.
      segments: int32 [batch, seq]. The document of each token; None if each row is one document.
      window: how many tokens a query attends to, see `Window`.

    Returns:
      The result [batch, seq, heads, head_dim].
    """

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, window: Window) -> jax.Array: ...


@runtime_checkable
class CachedCore(Protocol):
    """Stores the keys and values of new tokens, and computes attention of their queries to all that are stored."""

    def with_tokens(
        self, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, window: Window
    ) -> tuple[jax.Array, Any]:
        """The result [batch, seq, heads, head_dim], and the cache with the new tokens.

        Args:
          k, v: [batch, seq, kv_heads, head_dim]: the key heads that this device stores.
          positions: int32 [batch, seq]. The position of each token in its document.
        """
        ...


@runtime_checkable
class Cache(Protocol):
    """The keys and values of earlier tokens in all layers: a tree of arrays, which the scan over layers carries."""

    def layer(self, index: Int[Array, ""], prompts: Core) -> CachedCore:
        """The core of one layer.

        Args:
          prompts: the core that computes a prompt which begins at position 0.
        """
        ...


class Documents(NamedTuple):
    """The documents of queries and of keys, where they differ. A query attends to the keys of its own document.

    A query or a key with a document of its own is hidden: it belongs to `HIDDEN_QUERY` or `HIDDEN_KEY`.
    """

    queries: Int[Array, "B S"]
    keys: Int[Array, "B T"]


HIDDEN_QUERY, HIDDEN_KEY = -(2**31), -(2**31) + 1
"""Documents that no query and key share."""


def shares_rows(num_queries: int, num_keys: int) -> bool:
    """Whether each device that has a part of the queries' row has one of the keys' row. If not, it has all keys."""
    ctx = current()
    num_devices = ctx.shards("seq") if ctx else 1
    return num_queries == num_keys or (num_queries % num_devices == 0 and num_keys % num_devices == 0)


def known_window(window: Window) -> int | None:
    """The window if it is the same in all layers; None if there is none, or if only the device knows it."""
    return window if isinstance(window, int) else None


def documents(segments: Any, q_BSHh: Float[Array, "B S H h"], k_BTKh: Any = None) -> Any:
    """The document of each token, the same for all tokens of a row if each row is one document.

    Args:
      segments: int32 [batch, seq], or `Documents`, which are returned; None if each row is one document.
      k_BTKh: the keys, if there may be more or fewer of them than queries: then the result may be `Documents`.
    """
    if segments is not None:
        return segments
    of_queries = jnp.zeros(q_BSHh.shape[:2], jnp.int32)
    if k_BTKh is None or k_BTKh.shape[:2] == q_BSHh.shape[:2]:
        return of_queries
    return Documents(of_queries, jnp.zeros(k_BTKh.shape[:2], jnp.int32))


def needed_scores(seq_len: int, window: Window) -> Fraction:
    """The scores of a row that causal attention needs: half of all, by the convention of Megatron-LM.

    A window that is the same in all layers excludes the scores beyond it.
    """
    width = min(window, seq_len) if isinstance(window, int) else seq_len
    return seq_len * width - Fraction(width**2, 2)
