"""Attention over pages equals attention over the tokens of each row, wherever the pages lie."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.nn.attention import paged
from meshpar.nn.attention.core import causal_window
from meshpar.nn.attention.paged import PagedCache, PagedLayer
from meshpar.nn.attention.reference import dot_product_attention

LAYERS, SHARDS, ROWS, PAGES, SIZE, KV_HEADS, HEADS, WIDTH = 2, 2, 2, 12, 4, 2, 4, 8
LENGTHS = [11, 3, 22, 1]
"""The tokens of each row that are cached; two rows in each shard."""
ROW_PAGES = 6


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape) + sum(shape)).normal(size=shape)


def tables() -> np.ndarray:
    """Pages in a random order; a page of one row is of no other row of the shard."""
    order = np.random.default_rng(0)
    return np.concatenate([order.permutation(PAGES).reshape(ROWS, ROW_PAGES) for _ in range(SHARDS)]).astype(np.int32)


def difference(num_new: int, window: int | None, block_size: int = 8) -> float:
    """The largest difference for `num_new` tokens after those that are cached."""
    keys, values = drawn(4, 24, KV_HEADS, WIDTH), drawn(4, 24, KV_HEADS, WIDTH)[::-1]
    table = tables()
    pages = [np.full((SHARDS, LAYERS, PAGES, SIZE, KV_HEADS, WIDTH), np.nan) for _ in range(2)]
    for row, length in enumerate(LENGTHS):
        for position in range(length):
            place = (row // ROWS, 1, table[row, position // SIZE], position % SIZE)
            for stored, tokens in zip(pages, (keys, values), strict=True):
                stored[place] = tokens[row, position]
    positions = np.array(LENGTHS, np.int32)[:, None] + np.arange(num_new, dtype=np.int32)
    new = [np.take_along_axis(tokens, positions[..., None, None], axis=1) for tokens in (keys, values)]
    q = drawn(4, num_new, HEADS, WIDTH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged, "BLOCK_SIZE", block_size)

        @jax.jit
        def both(q: Any, new: Any, pages: Any, table: Any, rows: Any, positions: Any) -> Any:
            layer = PagedLayer(PagedCache(*pages, table), jnp.int32(1))
            visible = causal_window(positions, jnp.arange(24, dtype=jnp.int32), window)
            return layer.with_tokens(q, *new, positions, window), dot_product_attention(q, *rows, visible)

        (out, cache), expected = both(q, new, pages, table, (keys, values), positions)
    assert np.isnan(np.asarray(cache.keys)[:, 0]).all()  # nothing is written to the other layer
    return float(abs(np.asarray(out) - np.asarray(expected)).max())


@pytest.mark.parametrize(("num_new", "window"), [(1, None), (2, 3)])
def test_attention_over_pages_equals_attention_over_rows(float64, num_new, window):
    assert difference(num_new, window) < 1e-12


def test_a_block_may_be_smaller_than_a_page_and_longer_than_a_row(float64):
    assert difference(1, None, block_size=1) < 1e-12
    assert difference(1, None, block_size=64) < 1e-12


@pytest.mark.parametrize("fault", ["a page of another row", "values that are not cleared", "a block too few"])
def test_a_planted_fault_is_seen(float64, monkeypatch, fault):
    if fault == "a page of another row":
        by_shard = paged._by_shard
        monkeypatch.setattr(paged, "_by_shard", lambda x, num: by_shard(jnp.roll(x, 1, axis=0), num))
    elif fault == "values that are not cleared":
        where = jnp.where
        monkeypatch.setattr(jnp, "where", lambda *args: args[1] if args[1].ndim == 4 else where(*args))
    else:
        monkeypatch.setattr(jnp, "minimum", lambda *args: jnp.int32(1))
    assert not difference(1, None) < 1e-2
