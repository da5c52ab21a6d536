"""A loss in chunks computes on every layout, in stages too, what one device computes with all logits at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshpar.partition import moved
from meshpar.train import chunks
from meshpar.train.chunks import chunk_length
from meshpar.train.loss import LossConfig
from tests import pipelines
from tests.equivalence.conftest import ROWS, SEQ, on_one_device, outcome, prepared, without_backward
from tests.layouts import LAYOUTS

TIED = "llama_gqa_tied_dropout"
IN_CI = {
    ("data8", "auto", 4), ("zero3", "manual", 1), ("tensor4_sp", "manual", 1), ("data2_fsdp2_tensor2", "manual", 4),
    ("data2_fsdp2_tensor2", "auto", 1),
}  # fmt: skip
EVERY = [(layout, lowering, num) for layout in LAYOUTS for lowering in ("manual", "auto") for num in (1, 4)]
CASES = [pytest.param(*case, marks=[] if case in IN_CI else pytest.mark.slow) for case in EVERY]


def chunked(layout: str | None, lowering: str, num_microbatches: int, model: str = TIED, chunk: int = 12) -> Any:
    """With 4 rows on each device and 12 tokens in a chunk, a step has five chunks of 3 positions and one of 1."""
    return prepared(model, layout, lowering, num_microbatches, loss=LossConfig(chunk=chunk))


def difference(*case: Any, **more: Any) -> float:
    model = more.get("model", TIED)
    return outcome(chunked(*case, **more)).difference(on_one_device(model))


@pytest.fixture(autouse=True, scope="module")
def _reference():
    """The reference is computed before any fault is planted."""
    with jax.enable_x64(True):
        on_one_device(TIED)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("layout", "lowering", "num_microbatches"), CASES)
def test_a_chunked_loss_is_equal_to_all_logits_on_one_device(layout, lowering, num_microbatches):
    assert difference(layout, lowering, num_microbatches) < 1e-10


@pytest.mark.parametrize(
    "model", ["llama_lora", *(pytest.param(m, marks=pytest.mark.slow) for m in ("llama", "gpt_dropout_remat"))]
)
def test_a_chunked_loss_with_an_untied_or_a_frozen_head_is_equal_to_one_device(model):
    assert difference("data2_fsdp2_tensor2", "manual", 1, model=model) < 1e-10


def test_control_the_reference_has_one_chunk_and_the_others_have_several():
    assert chunk_length("auto", ROWS, SEQ, 16, 32) is None
    assert chunk_length(12, ROWS // 8, SEQ, 16, 32) == 3


STAGES = [
    pytest.param("1f1b", "pipe4", "llama", marks=pytest.mark.slow),
    ("zbv", "pipe2", "tied"),
    ("interleaved", "fsdp2_tensor2_sp", "llama"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "mesh", "model"), STAGES)
def test_a_chunked_loss_in_stages_is_equal_to_one_device(kind, mesh, model):
    schedule = pipelines.scheduled(kind, mesh, 4)
    run = pipelines.prepared(pipelines.MODELS[model](4), mesh, schedule, loss=LossConfig(chunk=30))
    assert chunk_length(30, pipelines.ROWS // 4, pipelines.SEQ, 16, 32) == 2
    assert pipelines.difference(run, model, 4) < 1e-10


# Planted faults ----------------------------------------------------------------------------------------------------

IN_CHUNKS = chunks._in_chunks


def test_planted_a_forgotten_remainder_is_seen(monkeypatch):
    def all_but_the_rest(visit, carry, arrays, length):
        even = SEQ - SEQ % length
        carry, total, found = IN_CHUNKS(visit, carry, jax.tree.map(lambda x: x[:, :even], arrays), length)
        return carry, total, jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, SEQ - even), (0, 0))), found)

    monkeypatch.setattr(chunks, "_in_chunks", all_but_the_rest)
    assert difference("zero3", "manual", 1) > 1e-3


def test_planted_chunks_without_their_part_of_the_heads_gradient_are_seen(monkeypatch):
    def only_the_last(visit, carry, arrays, length):
        return IN_CHUNKS(lambda sums, chunk: visit(jnp.zeros_like(sums) + 0 * sums, chunk), carry, arrays, length)

    def faulty(*args):
        return (IN_CHUNKS if args[1] is None else only_the_last)(*args)

    monkeypatch.setattr(chunks, "_in_chunks", faulty)
    assert difference("data8", "manual", 1) > 1e-3


def test_planted_chunks_that_are_joined_in_another_order_are_seen(monkeypatch):
    def reversed_in(visit, carry, arrays, length):
        carry, total, found = IN_CHUNKS(visit, carry, arrays, length)
        return carry, total, jax.tree.map(lambda x: x[:, ::-1], found)

    monkeypatch.setattr(chunks, "_in_chunks", reversed_in)
    assert difference("data8", "manual", 1) > 1e-3


def test_planted_a_region_entered_without_its_backward_sum_is_seen(monkeypatch):
    monkeypatch.setattr(moved, "varying", without_backward)
    assert difference("tensor4", "manual", 1) > 1e-3
