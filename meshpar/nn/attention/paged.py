"""The attention core of serving: keys and values are stored in pages, and each row has a table of its pages.

A page holds consecutive tokens. Rows of any length share a pool of pages, and rows with the same beginning can share
the pages of that beginning. A token is stored in the slot of its position, and a query attends to the slots up to its
own position. So rows need no padding mask: a slot that holds padding of a short prompt is overwritten by the token of
that position before any query attends to it.

Devices that hold different rows have pages of their own: a dim of the arrays counts these shards, and the numbers in a
table are pages of the row's shard. A row without a request has a number that no page has, and writes nowhere.

Shapes: D shards of the batch, N layers, P pages, s slots of a page, B batch, b = B / D, M pages of a row, n blocks of
m pages and t slots, S new tokens, K kv_heads, H heads, G = H / K, h head_dim (local shards in the manual lowering).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from meshpar.nn.attention.blocks import BLOCK_SIZE
from meshpar.nn.attention.codes import Stored, decoded, encoded
from meshpar.nn.attention.core import Core, Window, causal_window
from meshpar.nn.attention.kernel import for_prompts
from meshpar.nn.attention.key_heads import local_key_heads
from meshpar.nn.attention.online_softmax import Softmax, empty, masked_scores
from meshpar.nn.attention.reference import dot_product_attention
from meshpar.parallel.context import constrain, planned
from meshpar.partition.op import apply
from meshpar.partition.signature import Call, Signature

PAGES_DIMS = ("batch", "layers", "seq", "seq", "kv_heads", "head_dim")


class PagedCache(NamedTuple):
    """Keys (after rotary positions) and values: [shards, layers, pages, slots of a page, kv_heads, head_dim].

    Args:
      table: int32 [batch, pages of a row]. The pages of each row, in the order of its tokens; where it has none, the
        number of all pages. None if each row of a shard is the page of its number.
    """

    keys: Stored
    values: Stored
    table: Int[Array, "B M"] | None

    def layer(self, index: Int[Array, ""], prompts: Core) -> PagedLayer:
        """The core of one layer. Prompts attend to the cache too, since it may contain their beginning."""
        return PagedLayer(self, index)


class EmptyPages(PagedCache):
    """The same cache, for a program that computes whole prompts: before them there is nothing to attend to."""

    def layer(self, index: Int[Array, ""], prompts: Core) -> PagedLayer:
        """The core of one layer, which computes prompts with another core."""
        return PagedLayer(self, index, prompts)


@dataclass(frozen=True)
class PagedLayer:
    """Writes the new tokens to the pages of one layer, and attends to all tokens of their row, in blocks of pages.

    It computes as many blocks as the longest row on the device has.

    Args:
      cache: the cache of all layers. The scan over layers carries it, and writes in place.
      index: int32[]. The index of the layer.
      prompts: the core of whole prompts, which attend only to themselves; None to attend to the pages.

    Memory: the keys and values of one layer for a block of each row.

    Source: Kwon et al. 2023 (PagedAttention), arXiv:2309.06180.
    """

    cache: PagedCache
    index: Int[Array, ""]
    prompts: Core | None = None

    def with_tokens(
        self, q: Float[Array, "B S H h"], k: Float[Array, "B S K h"], v: Float[Array, "B S K h"],
        positions: Int[Array, "B S"], window: Window,
    ) -> tuple[Float[Array, "B S H h"], PagedCache]:  # fmt: skip
        """Two operations: pages differ between devices with other key heads, the result between those with others."""
        planning = planned()
        has_own = planning is None or planning.axes("heads") == planning.axes("kv_heads")
        of_k, of_row = "heads" if has_own else None, ("rows", None)
        of_new, of_q = (*of_row, of_k, None), (*of_row, "heads", None)
        leaves, tree = jax.tree.flatten((self.cache, self.index))
        of_cache = [("rows", None, None, None, of_k, None)[: x.ndim] for x in leaves]
        num_stored = len(jax.tree.leaves((self.cache.keys, self.cache.values)))

        def layer(leaves: Sequence[Any]) -> PagedLayer:
            cache, index = jax.tree.unflatten(tree, leaves)
            return replace(self, cache=cache, index=index)

        def store(call: Call, k: jax.Array, v: jax.Array, positions: jax.Array, *leaves: Any) -> list[Any]:
            cache = layer(leaves).stored(k, v, positions)
            return jax.tree.leaves((cache.keys, cache.values))

        def attend(
            call: Call, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, *more: Any
        ) -> list[jax.Array]:
            width = more[-1] if isinstance(window, jax.Array) else window
            return [layer(more[: len(leaves)]).attended(q, k, v, positions, width)]

        signature = Signature((of_new, of_new, of_row, *of_cache), tuple(of_cache[:num_stored]), store)
        leaves[:num_stored] = apply(signature, k, v, positions, *leaves)
        widths = [window] if isinstance(window, jax.Array) else []
        signature = Signature((of_q, of_new, of_new, of_row, *of_cache, *((),) * len(widths)), (of_q,), attend)
        (out,) = apply(signature, q, k, v, positions, *leaves, *widths)
        return out, layer(leaves).cache

    def stored(
        self, k: Float[Array, "B S K h"], v: Float[Array, "B S K h"], positions: Int[Array, "B S"]
    ) -> PagedCache:
        """The cache with the new tokens."""
        keys, values = self._put(self.cache.keys, k, positions), self._put(self.cache.values, v, positions)
        return self.cache._replace(keys=keys, values=values)

    def attended(
        self, q: Float[Array, "B S H h"], k: Float[Array, "B S K h"], v: Float[Array, "B S K h"],
        positions: Int[Array, "B S"], window: Window,
    ) -> Float[Array, "B S H h"]:  # fmt: skip
        """Attention of new tokens, which are stored already."""
        if self.prompts is not None:
            core = for_prompts(self.prompts, q, window)
            return core(q, local_key_heads(k, q), local_key_heads(v, q), None, window)
        cache, page_size = self.cache, _page_size(self.cache.keys)
        if (table := cache.table) is None:
            visible = causal_window(positions, jnp.arange(page_size, dtype=jnp.int32), window)
            keys, values = (local_key_heads(self._rows(x, None), q) for x in (cache.keys, cache.values))
            return dot_product_attention(q, keys, values, visible)
        pages = min(max(1, BLOCK_SIZE // page_size), table.shape[1])  # of a block
        num_slots = pages * page_size
        tables_Bnm = _blocks(table, pages)
        scaled = q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)

        def visit(block: Int[Array, ""], state: Softmax) -> Softmax:
            slots = block * num_slots + jnp.arange(num_slots, dtype=jnp.int32)
            table = tables_Bnm[:, block]
            keys = local_key_heads(self._rows(cache.keys, table), q)
            values = local_key_heads(self._rows(cache.values, table), q)
            # Slots that no token of the row has filled may hold NaN of an earlier row, and 0 times NaN is NaN.
            is_filled = slots <= positions[:, -1:]
            values = jnp.where(is_filled[..., None, None], values, jnp.zeros((), v.dtype))
            visible = causal_window(positions, slots, window)
            return state.with_keys(masked_scores(scaled, keys, visible), values)

        num_blocks = jnp.minimum(positions.max() // num_slots + 1, tables_Bnm.shape[1])
        return jax.lax.fori_loop(0, num_blocks, visit, empty(q)).result().astype(q.dtype)

    def _put(self, stored: Stored, new_BSKh: Float[Array, "B S K h"], positions_BS: Int[Array, "B S"]) -> Stored:
        num_pages, page_size = jax.tree.leaves(stored)[0].shape[2:4]
        if (table := self.cache.table) is None:
            put, places = self._put_in_rows, (positions_BS,)
        else:
            page_BS = jnp.take_along_axis(
                table, positions_BS // page_size, axis=1, mode="fill", fill_value=num_pages
            )  # fmt: skip
            put, places = jax.vmap(self._put_in_pages), (page_BS, positions_BS % page_size)

        def write(pages: Shaped[Array, "D N P s *rest"], new_BS: Shaped[Array, "B S *rest"]) -> jax.Array:
            written = put(pages, *(_by_shard(x, len(pages)) for x in (*places, new_BS)))
            return constrain(written, *PAGES_DIMS[: written.ndim])

        return jax.tree.map(write, stored, encoded(new_BSKh, stored))

    def _put_in_pages(
        self, pages: Shaped[Array, "N P s *rest"], page_bS: jax.Array, slot_bS: jax.Array, new_bS: jax.Array
    ) -> jax.Array:
        return pages.at[self.index, page_bS, slot_bS].set(new_bS, mode="drop")

    def _put_in_rows(
        self, pages: Shaped[Array, "D N P s *rest"], slot_DbS: jax.Array, new_DbS: Shaped[Array, "D b S *rest"]
    ) -> jax.Array:
        """Each row is declared as a batch dim, so that GSPMD can shard it. An index is (layer, slot)."""
        how = jax.lax.ScatterDimensionNumbers(
            operand_batching_dims=(0, 2), scatter_indices_batching_dims=(0, 1), scatter_dims_to_operand_dims=(1, 3),
            inserted_window_dims=(1, 3), update_window_dims=tuple(range(3, new_DbS.ndim)),
        )  # fmt: skip
        where = jnp.stack([jnp.full_like(slot_DbS, self.index), slot_DbS], axis=-1)
        return jax.lax.scatter(pages, where, new_DbS, how, mode="drop")

    def _rows(self, stored: Stored, table: Int[Array, "B m"] | None) -> Float[Array, "B t K h"]:
        """The keys or values in the pages of a table, in the order of their tokens; None for all pages."""

        def rows(pages: Shaped[Array, "N P s *rest"], table_bm: jax.Array) -> Shaped[Array, "b m s *rest"]:
            return pages.at[self.index, table_bm].get(mode="clip")

        def read(pages: Shaped[Array, "D N P s *rest"]) -> Shaped[Array, "B t *rest"]:
            if table is None:
                found = jax.lax.dynamic_index_in_dim(pages, self.index, axis=1, keepdims=False)
                return found.reshape(-1, *found.shape[2:])
            found = jax.vmap(rows)(pages, _by_shard(table, len(pages)))
            return found.reshape(len(table), -1, *pages.shape[4:])

        return constrain(decoded(jax.tree.map(read, stored)), "batch", "seq", "kv_heads", "head_dim")


def _page_size(stored: Stored) -> int:
    return jax.tree.leaves(stored)[0].shape[3]


def _by_shard(x: Shaped[Array, "B *rest"], num_shards: int) -> Shaped[Array, "D b *rest"]:
    return x.reshape(num_shards, -1, *x.shape[1:])


def _blocks(table_BM: Int[Array, "B M"], num_pages: int) -> Int[Array, "B n m"]:
    """Tables of `num_pages` each. The last one is filled with page 0, whose slots are hidden."""
    missing = -table_BM.shape[1] % num_pages
    return jnp.pad(table_BM, ((0, 0), (0, missing))).reshape(len(table_BM), -1, num_pages)
