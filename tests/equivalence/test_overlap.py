"""Layers with overlap compute what one device does."""

from __future__ import annotations

from itertools import product

import pytest

from meshpar.collectives import ring
from meshpar.nn.low_rank import Adapter
from tests.equivalence.conftest import MODELS, on_one_device, outcome, prepared
from tests.equivalence.test_layouts import REFUSED

TENSOR = [("tensor", "tensor4_sp"), ("tensor", "data2_fsdp2_tensor2")]
FSDP = [("fsdp", "zero3"), ("fsdp", "hsdp2x4"), ("fsdp", "data2_fsdp2_tensor2")]


EVERY = [
    (model, section, layout, way, accumulation, unrolled)
    for model, (section, layout), way in product(MODELS, TENSOR + FSDP, ["ring", "bidirectional"])
    for accumulation, unrolled in ((1, 8), (4, 1))
    if (model, accumulation) != REFUSED
]
SAMPLE = [
    ("llama", "tensor", "tensor4_sp", "ring", 1, 8),
    ("llama_lora", "tensor", "tensor4_sp", "bidirectional", 1, 8),
    ("gpt_dropout_remat", "fsdp", "data2_fsdp2_tensor2", "ring", 4, 1),
    ("llama_dora", "fsdp", "zero3", "bidirectional", 1, 8),
]
CASES = [
    pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.slow, id="-".join(map(str, case))) for case in EVERY
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "section", "layout", "way", "accumulation", "unrolled"), CASES)
def test_layers_with_overlap_are_equal_to_one_device(model, section, layout, way, accumulation, unrolled, monkeypatch):
    monkeypatch.setattr(ring, "UNROLLED", unrolled)
    run = prepared(model, layout, "manual", accumulation, parallel={section: {"overlap": way}})
    assert outcome(run).difference(on_one_device(model)) < 1e-10


@pytest.mark.slow
def test_planted_an_adapter_without_its_scale_is_seen(monkeypatch):
    monkeypatch.setattr(Adapter, "scaled", lambda self, x: x)
    run = prepared("llama_lora", "tensor4_sp", "manual", 1, parallel={"tensor": {"overlap": "ring"}})
    assert outcome(run).difference(on_one_device("llama_lora")) > 1e-3


def test_planted_a_chunk_that_is_taken_for_another_is_seen(monkeypatch):
    monkeypatch.setattr(ring, "UNROLLED", 2)  # no other test has this ring, so that no cached trace hides the fault
    rank = ring.Ring.rank
    monkeypatch.setattr(ring.Ring, "rank", lambda ring, distance=0: rank(ring, -distance))
    run = prepared("llama", "zero3", "manual", 1, parallel={"fsdp": {"overlap": "ring"}})
    assert outcome(run).difference(on_one_device("llama")) > 1e-3
