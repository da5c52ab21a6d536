"""The attention cores by themselves: results, gradients, FLOPs and memory."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.cost.flops import flops, needed_flops, traced_products
from meshpar.nn.attention import Auto, Blocks, Reference, online_softmax, shards, tables
from meshpar.nn.attention.setting import Setting
from tests.comparison import largest_difference

BATCH = 2
HEADS = 6
SIZE = 4


def inputs(seq, kv_heads, dtype="float64"):
    """Queries, keys, values, and documents of which some begin within a block."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(BATCH, seq, n, SIZE)), dtype) for n in (HEADS, kv_heads, kv_heads)]
    return arrays, jnp.asarray(np.sort(rng.integers(0, 3, (BATCH, seq)), axis=1), jnp.int32)


def computed(core, seq, kv_heads, window=None, dtype="float64"):
    """The result and the gradients of q, k and v."""
    arrays, segments = inputs(seq, kv_heads, dtype)

    def weighted(q, k, v):
        out = core(q, k, v, segments, window)
        return (out * jnp.cos(jnp.arange(out.size, dtype=out.dtype).reshape(out.shape))).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(weighted, (0, 1, 2), has_aux=True))(*arrays)
    return out, *grads


def difference(*arguments, core, **options):
    return largest_difference(computed(core, *arguments, **options), computed(Reference(), *arguments, **options))


@pytest.mark.parametrize(
    ("seq", "block_size", "kv_heads"),
    [(32, 4, 1), (16, 16, 3), (16, 6, 6), (17, 8, 3), (29, 7, 1), (5, 64, 3), (1, 1, 3)],
)
def test_blocks_equal_the_reference(float64, seq, block_size, kv_heads):
    assert difference(seq, kv_heads, core=Blocks(block_size=block_size)) < 1e-12


@pytest.mark.parametrize(("block_size", "window"), [(4, 1), (4, 4), (4, 5), (6, 3), (6, 9), (6, 40)])
@pytest.mark.parametrize("known", [True, False], ids=["one for all layers", "by layer"])
def test_blocks_with_a_window_equal_the_reference(float64, block_size, known, window):
    width = window if known else jnp.int32(window)
    assert difference(16, 3, core=Blocks(block_size=block_size), window=width) < 1e-12


def test_blocks_in_bfloat16_are_as_exact_as_the_reference():
    exact = computed(Reference(), 32, 3, dtype="float32")

    def error(core):
        found = computed(core, 32, 3, dtype="bfloat16")
        return largest_difference([x.astype("float32") for x in found], exact)

    assert error(Blocks(block_size=8)) < 1.2 * error(Reference())


def test_planted_a_forgotten_pair_changes_the_result(float64, monkeypatch):
    visible_pairs = tables.visible_pairs
    monkeypatch.setattr(tables, "visible_pairs", lambda *args: np.delete(visible_pairs(*args), 2, 0))
    assert difference(16, 3, core=Blocks(block_size=4)) > 1e-2


def test_planted_blocks_that_overlap_change_the_result(float64, monkeypatch):
    monkeypatch.setattr(tables.BlockGrid, "is_ragged", False)
    assert difference(16, 3, core=Blocks(block_size=6)) > 1e-2
    assert difference(16, 3, core=Blocks(block_size=4)) < 1e-12


def test_planted_a_backward_without_its_row_sums_changes_the_gradients(float64, monkeypatch):
    monkeypatch.setattr(shards, "backward_of", lambda out, *rest: online_softmax.backward_of(0 * out, *rest))
    assert difference(16, 3, core=Blocks(block_size=4)) > 1e-2


# FLOPs and memory ------------------------------------------------------------------------------------------------


def forward(core, seq, window=None):
    (q, k, v), segments = inputs(seq, 3, "float32")
    return jax.make_jaxpr(lambda q, k, v: core(q, k, v, segments, window))(q, k, v)


def executed(core, seq, window=None):
    return flops(traced_products(forward(core, seq, window)))["dot_general"]


PER_SCORE = 2 * 2 * BATCH * HEADS * SIZE
"""FLOPs of one score in each row and head, and of its product with a value."""


@pytest.mark.parametrize(
    ("seq", "block_size", "window", "num_pairs"),
    [
        (32, 8, None, 10),
        (64, 8, None, 28 + 8 * 3 / 4),
        (32, 32, None, 1),
        (60, 8, None, 36),
        (64, 8, 1, 8 * 2 / 4),
        (64, 8, 2, 7 + 8 * 3 / 4),
        (64, 8, 9, 7 + 8 * 3 / 4),
        (64, 8, 10, 13 + 8 * 3 / 4),
    ],
)
def test_only_pairs_with_a_visible_token_are_computed(seq, block_size, window, num_pairs):
    """From 8 blocks on, one on the diagonal is computed as four pairs of half blocks; three have a visible token."""
    assert executed(Blocks(block_size=block_size), seq, window) == num_pairs * block_size**2 * PER_SCORE


def test_the_reference_computes_all_scores():
    assert executed(Reference(), 32) == executed(Reference(), 32, 2) == 32**2 * PER_SCORE


@pytest.mark.parametrize("window", [None, 5, 32, 99])
def test_every_core_reports_the_same_needed_flops(window):
    needs = {needed_flops(traced_products(forward(c, 32, window))) for c in (Blocks(block_size=8), Reference())}
    width = min(window or 32, 32)
    assert needs == {(32 * width - width**2 / 2) * PER_SCORE}


def test_at_4096_tokens_auto_computes_at_most_4_percent_more_than_is_needed():
    arrays = [jax.ShapeDtypeStruct((1, 4096, n, SIZE), "float32") for n in (HEADS, 3, 3)]
    segments = jax.ShapeDtypeStruct((1, 4096), "int32")

    def ratio(core):
        def run(q, k, v, s):
            return core(q, k, v, s, None)

        products = traced_products(jax.make_jaxpr(run)(*arrays, segments))
        return float(sum(product.total for product in products) / needed_flops(products))

    assert 1.0 < ratio(Auto()) < 1.04
    assert ratio(Reference()) == 2.0


def temporaries(core, seq):
    arrays = [jax.ShapeDtypeStruct((1, seq, n, 8), "float32") for n in (4, 2, 2)]
    segments = jax.ShapeDtypeStruct((1, seq), "int32")

    def loss(q, k, v, segments):
        return core(q, k, v, segments, None).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays, segments).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_grows_linearly_with_the_length_of_the_row():
    assert temporaries(Blocks(), 4096) < 2.05 * temporaries(Blocks(), 2048)
    assert temporaries(Reference(), 2048) > 3.5 * temporaries(Reference(), 1024)


def on_cpus(seq_len, **more):
    return Setting(seq_len=seq_len, head_dim=SIZE, dtype=np.dtype("float32"), platform="cpu", **more)


@pytest.mark.parametrize("platform", ["cpu", None])
def test_auto_computes_in_blocks_on_cpus(platform):
    assert {Auto().select(replace(on_cpus(seq_len), platform=platform))[0] for seq_len in (16, 128, 129)} == {Blocks()}


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_auto_holds_the_scores_of_short_rows_where_there_is_a_kernel(platform):
    core, why = Auto().select(replace(on_cpus(128), platform=platform))
    assert core == Reference() and "at most 128 tokens" in why
    assert Auto().select(replace(on_cpus(129), platform=platform))[0] != Reference()


def test_what_auto_selects_is_reported():
    long = Auto().describe(on_cpus(4096))
    assert long == "blocks: 528 of 1024 pairs of blocks of 128 tokens; CPUs have no kernel"
    assert Blocks(block_size=8).describe(on_cpus(32, window=1)) == "blocks: 4 of 16 pairs of blocks of 8 tokens"
    anywhere = Auto().describe(replace(on_cpus(16), platform=None))
    assert anywhere.startswith(
        "blocks: 1 of 1 pairs of blocks of 16 tokens; CPUs have no kernel; on a GPU reference: rows"
    )


def test_a_small_run_for_verify_has_the_core_of_the_run():
    assert Auto().reference(4096, 16) == Blocks(block_size=2)
    assert Auto().reference(128, 16) == Blocks(block_size=16)
    assert Reference().reference(4096, 16) == Reference()
    assert Blocks(block_size=512).reference(512, 16) == Blocks(block_size=16)


@pytest.mark.parametrize("window", [None, 1, 7, 8, 100, 5000])
@pytest.mark.parametrize("seq", [1, 5, 128, 1000])
def test_the_number_of_visible_pairs_is_that_of_their_list(seq, window):
    grid = tables.BlockGrid(seq, 7)
    assert tables.num_visible_pairs(grid, window) == len(tables.visible_pairs(grid, 0, window))
