"""A small run has the structure of the large one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpar import GPT, AdamW, AxisRules, Llama, MeshLayout, Run, Synthetic, load, prepare
from meshpar.parallel.pipeline.schedule import OneFOneB
from meshpar.verification.shrink import MOST_DEVICES, least_factor, shrink, small_sizes

CONFIGS = sorted(Path("configs").glob("*.yaml"))


def run_of(model, mesh, rules, **more) -> Run:
    data = Synthetic(batch_size=64, seq_len=128, vocab_size=model.vocab_size)
    return Run(
        model=model, data=data, optim=AdamW(lr=1e-3), mesh=mesh, rules=rules, num_steps=5, run_dir="unused", **more
    )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_shrinks_to_one_that_resolves(path, float64):
    run = load(path)
    small = shrink(run)
    prepare(small, small.mesh.abstract())
    assert {axis for axis, size in small.mesh.sizes.items() if size > 1} == {
        axis for axis, size in run.mesh.sizes.items() if size > 1
    }
    assert small.mesh.requested() <= MOST_DEVICES
    assert shrink(small) == small.model_copy(update={"num_microbatches": small.num_microbatches})


@given(st.lists(st.integers(1, 24), min_size=3, max_size=3))
def test_no_axis_is_lost_when_sizes_shrink(sizes):
    before = dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))
    after = small_sizes(before)
    assert all(before[axis] % after[axis] == 0 for axis in before)
    assert all((after[axis] > 1) == (before[axis] > 1) for axis in before)
    # Either it is small, or no axis can shrink without being lost.
    assert math.prod(after.values()) <= 8 or all(size == least_factor(size) for size in after.values())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor", "rules", "expected"),
    [
        (32, 8, 8, {}, (16, 8)),  # one key head a device, groups of queries
        (32, 16, 4, {}, (16, 8)),  # two key heads a device
        (8, 8, 8, {}, (8, 8)),  # each query its own key head
        (16, 4, 8, {"kv_heads": ()}, (16, 4)),  # fewer key heads than devices
        (9, 3, 3, {}, (9, 3)),  # groups of three
    ],
)
def test_a_shrunken_model_has_heads_that_fit_its_mesh(heads, kv_heads, tensor, rules, expected, float64):
    model = Llama(
        num_layers=6, hidden_size=8 * heads * tensor, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=96
    )
    small = shrink(run_of(model, MeshLayout(tensor=tensor), AxisRules(preset="megatron", vocab=(), **rules)))
    assert (small.model.num_heads, small.model.kv_heads) == expected
    prepare(small, small.mesh.abstract())


def test_the_structure_of_a_model_is_kept():
    model = GPT(
        num_layers=12, hidden_size=96, num_heads=6, intermediate_size=384, vocab_size=50257, pad_vocab_to_multiple=64,
        tie_embeddings=True, dropout=0.1, remat="full", max_seq_len=1024,
    )  # fmt: skip
    run = run_of(model, MeshLayout(data=4, tensor=2), AxisRules(preset="megatron"), num_microbatches=8)
    small = shrink(run)
    assert (small.model.tie_embeddings, small.model.dropout, small.model.remat.policy) == (True, 0.1, "full")
    assert small.model.padded_vocab > small.model.vocab_size
    assert small.model.max_seq_len == 2 * small.data.seq_len
    assert (small.num_microbatches, small.data.batch_size) == (2, 16)
    assert small.precision.params == small.precision.compute == "float64"
    assert small.optim == run.optim


def test_padded_layers_stay_padded(float64):
    model = Llama(num_layers=70, pad_layers_to_multiple=12, hidden_size=64, num_heads=4, intermediate_size=64)
    schedule = OneFOneB(num_microbatches=24)
    small = shrink(run_of(model, MeshLayout(pipe=12), AxisRules(preset="pipeline"), parallel={"pipeline": schedule}))
    assert (small.mesh.pipe, small.model.num_layers, small.model.layer_stack().stacked_layers) == (4, 5, 8)
    prepare(small, small.mesh.abstract())


def test_a_free_axis_and_slices_are_shrunk_too():
    rules = AxisRules(preset=("fsdp", "megatron"))
    model = Llama(num_layers=2, hidden_size=64, num_heads=4, intermediate_size=64)
    free = shrink(run_of(model, MeshLayout(data=-1, tensor=4), rules))
    assert (free.mesh.data, free.mesh.tensor) == (2, 4)
    slices = shrink(run_of(model, MeshLayout(fsdp=8, dcn={"data": 4}), rules))
    assert (slices.mesh.data, slices.mesh.fsdp, slices.mesh.dcn) == (2, 4, None)
