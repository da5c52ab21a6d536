"""With rows that are sharded over axis context, every kind computes what one device does."""

from __future__ import annotations

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.collectives.reduction import Reduce
from meshpar.collectives.swap import pairings
from meshpar.data import Synthetic
from meshpar.experiment.config import Run
from meshpar.mesh.layout import MeshLayout
from meshpar.models import Llama
from meshpar.nn.attention import Blocks, Reference, shards
from meshpar.nn.attention.context_parallel import over_axes
from meshpar.optim import AdamW
from meshpar.parallel.context import ParallelContext
from meshpar.parallel.pipeline.schedule import OneFOneB
from meshpar.parallel.sequence import SequenceLayout
from meshpar.parallel.strategies import ContextParallel, Parallel
from meshpar.sharding.rules import AxisRules
from meshpar.train import batches
from meshpar.train.program import on_shards
from meshpar.verification.verify import verify
from tests.comparison import largest_difference
from tests.equivalence.conftest import on_one_device, outcome, prepared

PIPELINE = OneFOneB(num_microbatches=2)

# Attention alone --------------------------------------------------------------------------------------------------

BATCH = 2
SEQ = 48
SIZE = 4
RING = ContextParallel()
CONTIGUOUS = ContextParallel(layout="contiguous")
GATHERED = ContextParallel(kind="all_gather")
ULYSSES = ContextParallel(kind="ulysses")


def arrays(heads, kv_heads):
    """Queries, keys, values, and documents of which some cross shards."""
    rng = np.random.default_rng(0)
    drawn = [jnp.asarray(rng.normal(size=(BATCH, SEQ, n, SIZE))) for n in (heads, kv_heads, kv_heads)]
    return drawn, jnp.asarray(np.sort(rng.integers(0, 3, (BATCH, SEQ)), axis=1), jnp.int32)


def computed(attend, drawn, segments):
    """The result and the gradients of q, k and v."""

    def weighted(q, k, v):
        out = attend(q, k, v, segments)
        return (out * jnp.cos(jnp.arange(out.size, dtype=out.dtype).reshape(out.shape))).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(weighted, (0, 1, 2), has_aux=True))(*drawn)
    return out, *grads


def difference(context, size, heads=8, kv_heads=4, window=None, by_layer=False, block_size=3, pipeline=None):
    """The largest difference from the reference on one device; `by_layer` passes the window as an array."""
    width = jnp.int32(window) if by_layer else window
    ctx = ParallelContext(
        mesh=MeshLayout(context=size).build(jax.devices()[:size]),
        rules=AxisRules(preset=("context",)),
        manual=True,
        parallel=Parallel(context=context, pipeline=pipeline),
    )
    tokens = ctx.pspec("batch", "seq")
    local = on_shards(
        lambda q, k, v, segments: over_axes(
            Blocks(block_size=block_size), q, k, v, segments, width, ctx.axes("seq"), ctx.sequence
        ),
        ctx, (tokens, tokens, tokens, tokens), tokens,
    )  # fmt: skip
    order = ctx.sequence.order(SEQ)
    drawn, segments = arrays(heads, kv_heads)

    def arranged(q, k, v, segments):
        out = local(*(x[:, order] for x in (q, k, v, segments)))
        return out[:, np.argsort(order)]

    def reference(q, k, v, segments):
        return Reference()(q, k, v, segments, width)

    return largest_difference(computed(arranged, drawn, segments), computed(reference, drawn, segments))


KINDS = {
    "ring": RING,
    "ring_contiguous": CONTIGUOUS,
    "gathered": GATHERED,
    "gathered_contiguous": ContextParallel(kind="all_gather", layout="contiguous"),
    "ulysses": ULYSSES,
}
SHORT = 5
LONG = 20  # of 48 tokens: less and more than a shard, for all sizes but two
SAMPLE = [
    ("ring", 4, None, False),
    ("ring_contiguous", 3, SHORT, False),
    ("ring", 8, LONG, False),
    ("gathered", 4, LONG, True),
    ("ulysses", 4, SHORT, False),
]
ALL = [*product(KINDS, (2, 3, 4, 8), (None, SHORT, LONG), (False,)), *product(KINDS, (2, 4), (LONG,), (True,))]


@pytest.mark.parametrize(
    ("kind", "size", "window", "by_layer"),
    [pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.slow) for case in ALL],
)
def test_attention_over_shards_equals_attention_over_whole_rows(float64, kind, size, window, by_layer):
    heads = 6 if size == 3 else 8
    assert difference(KINDS[kind], size, heads, heads // 2, window, by_layer) < 1e-12


@pytest.mark.parametrize("kv_heads", [1, 2, 3, pytest.param(6, marks=pytest.mark.slow)])
def test_ulysses_works_with_fewer_key_heads_than_devices(float64, kv_heads):
    assert difference(ULYSSES, 4, heads=12, kv_heads=kv_heads) < 1e-12


def test_ulysses_passes_rows_without_segments_to_its_core(float64, monkeypatch):
    """With segments, a kernel that does not separate documents would refuse such rows."""
    got = []

    def attend(self, q, k, v, segments, window):
        got.append(segments)
        return q

    monkeypatch.setattr(Reference, "__call__", attend)
    ctx = ParallelContext(
        mesh=MeshLayout(context=2).build(jax.devices()[:2]),
        rules=AxisRules(preset=("context",)),
        manual=True,
        parallel=Parallel(context=ULYSSES),
    )
    tokens = ctx.pspec("batch", "seq")
    (q, k, v), _ = arrays(8, 4)
    local = on_shards(
        lambda q, k, v: over_axes(Reference(), q, k, v, None, None, ctx.axes("seq"), ctx.sequence),
        ctx,
        (tokens,) * 3,
        tokens,
    )
    jax.eval_shape(local, q, k, v)
    assert got == [None]


@pytest.mark.parametrize(
    ("layout", "window"), [("zigzag", None), ("contiguous", 5), pytest.param("zigzag", 9, marks=pytest.mark.slow)]
)
def test_a_hybrid_equals_attention_over_whole_rows(float64, layout, window):
    assert difference(ContextParallel(kind="hybrid", group=2, layout=layout), 8, window=window) < 1e-12


PAIRS = [
    (RING, 4, LONG, True),
    (CONTIGUOUS, 8, SHORT, False),
    (ContextParallel(kind="hybrid", group=2), 8, None, False),
    (CONTIGUOUS, 2, None, False),
    (RING, 8, None, False),
    (ContextParallel(kind="hybrid", group=2, layout="contiguous"), 4, SHORT, False),
]


@pytest.mark.parametrize(
    ("context", "size", "window", "by_layer"),
    [pytest.param(*case, marks=pytest.mark.slow if i else []) for i, case in enumerate(PAIRS)],
)
def test_keys_that_stages_exchange_in_pairs_equal_whole_rows(float64, context, size, window, by_layer):
    assert difference(context, size, window=window, by_layer=by_layer, pipeline=PIPELINE) < 1e-12


@pytest.mark.slow
def test_planted_pairs_that_meet_twice_change_attention(float64, monkeypatch):
    monkeypatch.setattr(shards, "pairings", lambda num: pairings(num)[:1] * (num - 1))
    assert difference(RING, 4, pipeline=PIPELINE) > 1e-2


# Faults -----------------------------------------------------------------------------------------------------------


def stale_keys_in_the_backward(patch):
    add = shards.add_gradients

    def of_other_keys(grid, grads, known, met, pairs):
        return add(grid, grads, known, met._replace(k=met.k[::-1]), pairs)

    patch.setattr(shards, "add_gradients", of_other_keys)


def mask_off_by_one_shard(patch):
    patch.setattr(shards.Shards, "source", lambda self, hop: (self.rank - hop + 1) % self.num_shards)


def gradients_of_keys_that_are_not_sent_home(patch):
    send = shards.Shards._send
    patch.setattr(
        shards.Shards, "_send", lambda self, tree, by: tree if len(tree) == 2 and by == 1 else send(self, tree, by)
    )


def label_lost_at_a_cut(patch):
    def shifted(x, order):
        return batches.arranged(x, order if order is None else np.roll(order, 1))

    patch.setattr("meshpar.train.training.arranged", shifted)


@pytest.mark.parametrize(
    "fault", [stale_keys_in_the_backward, mask_off_by_one_shard, gradients_of_keys_that_are_not_sent_home]
)
def test_planted_faults_change_attention(float64, fault, monkeypatch):
    fault(monkeypatch)
    assert difference(CONTIGUOUS if fault is mask_off_by_one_shard else RING, 4) > 1e-2


def test_planted_rows_in_another_order_than_the_layout_change_attention(float64, monkeypatch):
    monkeypatch.setattr(SequenceLayout, "order", lambda self, seq_len: np.arange(seq_len))
    assert difference(RING, 4) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [gradients_of_keys_that_are_not_sent_home, mask_off_by_one_shard, label_lost_at_a_cut, None]
)
def test_verify_blames_the_axis(fault, monkeypatch):
    run = Run(
        model=Llama(num_layers=2, hidden_size=16, num_heads=4, intermediate_size=32, vocab_size=64),
        data=Synthetic(batch_size=8, seq_len=64, vocab_size=64),
        optim=AdamW(lr=1e-2),
        mesh=MeshLayout(data=2, context=4),
        rules=AxisRules(preset="context"),
        num_steps=2,
        run_dir="unused",
    )
    if fault:
        fault(monkeypatch)
    found = verify(run)
    assert [row.axes for row in found.culprits] == ([("context",)] if fault else [])


# Whole steps ------------------------------------------------------------------------------------------------------

OVER_CONTEXT = {"embed": ("fsdp", "context")}
"""Parameters are stored in shards over context, too."""
# name: (model, mesh, presets, parallel, lowering, microbatches, rules, core)
COMPOSED = {
    "ring": ("llama", {"context": 4}, ["context"], {"context": RING}, "manual", 1, {}, None),
    "zero3": ("llama", {"fsdp": 2, "context": 4}, ["fsdp", "context"], {}, "manual", 1, OVER_CONTEXT, None),
    "zero2": ("llama", {"fsdp": 2, "context": 2}, ["zero2", "context"], {}, "manual", 2, OVER_CONTEXT, None),
    "zero1": ("llama", {"fsdp": 2, "context": 2}, ["zero1", "context"], {}, "manual", 2, OVER_CONTEXT, None),
    "context_alone_shards": ("llama", {"context": 4}, ["fsdp", "context"], {}, "manual", 1, OVER_CONTEXT, None),
    "hsdp": ("llama", {"replica": 2, "fsdp": 2, "context": 2}, ["hsdp", "context"], {}, "manual", 1, {}, None),
    "tensor": ("llama", {"tensor": 2, "context": 2}, ["megatron", "context"], {}, "manual", 1, {}, None),
    "tensor_sp": (
        "llama_gqa_options", {"fsdp": 2, "context": 2, "tensor": 2}, ["fsdp", "megatron_sp", "context"], {},
        "manual", 2, {}, Blocks(block_size=2),
    ),
    "dropout_remat": ("gpt_dropout_remat", {"data": 2, "context": 4}, ["context"], {}, "manual", 2, {}, None),
    "gathered_dropout": (
        "llama_gqa_tied_dropout", {"data": 2, "context": 2}, ["context"], {"context": GATHERED}, "manual", 1, {}, None,
    ),
    "ulysses": ("llama_gqa_tied_dropout", {"context": 4}, ["context"], {"context": ULYSSES}, "manual", 1, {}, None),
    "ulysses_tensor": (
        "llama", {"context": 2, "tensor": 2}, ["megatron_sp", "context"], {"context": ULYSSES}, "manual", 1, {}, None,
    ),
    "hybrid": (
        "gpt_gqa_tied", {"context": 8}, ["context"], {"context": ContextParallel(kind="hybrid", group=2)},
        "manual", 1, {}, None,
    ),
    "lora": ("llama_lora", {"data": 2, "context": 2}, ["context"], {}, "manual", 1, {}, None),
    "reduction": (
        "llama", {"data": 2, "context": 2}, ["context"], {"gradient_reduction": Reduce(bucket_bytes=4096)},
        "manual", 1, {}, None,
    ),
    "pipeline_ulysses": (
        "llama", {"pipe": 2, "context": 2}, ["pipeline", "context"],
        {"pipeline": PIPELINE, "context": ULYSSES}, "manual", 1, {}, None,
    ),
    "pipeline_zero": (
        "llama", {"fsdp": 2, "pipe": 2, "context": 2}, ["fsdp", "pipeline", "context"],
        {"pipeline": PIPELINE, "context": GATHERED},
        "manual", 1, OVER_CONTEXT, Blocks(block_size=2),
    ),
    "pipeline_tensor_sp": (
        "llama", {"pipe": 2, "context": 2, "tensor": 2}, ["pipeline", "megatron_sp", "context"],
        {"pipeline": PIPELINE, "context": ULYSSES}, "manual", 1, {}, None,
    ),
    "pipeline_ring": (
        "llama_gqa_tied_dropout", {"pipe": 2, "context": 4}, ["pipeline", "context"], {"pipeline": PIPELINE},
        "manual", 1, {}, None,
    ),
    "pipeline_hybrid": (
        "gpt_gqa_tied", {"pipe": 2, "context": 4}, ["pipeline", "context"],
        {"pipeline": PIPELINE, "context": ContextParallel(kind="hybrid", group=2)}, "manual", 1, {}, None,
    ),
    "window_contiguous": (
        "llama_gqa_options", {"context": 4}, ["context"], {"context": CONTIGUOUS},
        "manual", 1, {}, Blocks(block_size=3),
    ),
    "auto": ("llama", {"context": 4, "tensor": 2}, ["megatron", "context"], {}, "auto", 1, {}, None),
    "auto_zero3_blocks": (
        "llama_gqa_options", {"fsdp": 2, "context": 4}, ["fsdp", "context"], {}, "auto", 2, {}, Blocks(block_size=4),
    ),
}  # fmt: skip
IN_CI = ("tensor_sp", "pipeline_tensor_sp")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in IN_CI else pytest.mark.slow) for n in COMPOSED])
def test_steps_with_sharded_rows_equal_one_device(name):
    assert composed(name) < 1e-10


def composed(name):
    model, sizes, presets, parallel, lowering, num_microbatches, rules, core = COMPOSED[name]
    run = prepared(
        model, None, lowering, num_microbatches,
        mesh=MeshLayout(**sizes),
        rules=AxisRules(preset=tuple(presets), **rules),
        parallel=Parallel(**parallel),
        fields={"attention": core} if core else {},
    )  # fmt: skip
    return outcome(run).difference(on_one_device(model))
