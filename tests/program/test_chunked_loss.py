"""A step with its loss in chunks has the bytes and FLOPs of one without, and holds no array of all logits."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any

import pytest

from meshpar.experiment.config import Precision
from meshpar.experiment.prepare import Prepared
from meshpar.inspection.program.hlo import collectives_of, total_sent_bytes
from meshpar.mesh.varying import invariant
from meshpar.models import Llama
from meshpar.nn.lora import LoRA
from meshpar.train import chunks
from meshpar.train.loss import LossConfig
from meshpar.train.step import Step
from tests.layouts import LAYOUTS
from tests.program import test_bytes
from tests.program.oracle import closed_form, share
from tests.program.test_bytes import ROWS, SEQ, cost_as_traced, cost_as_written

CHUNK = 12
OTHERS: dict[str, dict[str, Any]] = {
    "bfloat16": {"precision": Precision(compute="bfloat16")},
    "frozen_head": {"lora": LoRA(rank=2, paths=("blocks.**",))},
    "tied": {"model": Llama(**test_bytes.SIZES, tie_embeddings=True)},
}
CASES = [
    pytest.param(layout, num, "plain", marks=[] if (i + num) % 2 else pytest.mark.slow)
    for i, layout in enumerate(LAYOUTS)
    for num in (1, 4)
]
CASES += [pytest.param("data2_fsdp2_tensor2", 1, name) for name in OTHERS]


def prepared(layout: str, chunk: Any, num_microbatches: int = 1, lowering: str = "manual", **more: Any) -> Prepared:
    return test_bytes.prepared(layout, lowering, num_microbatches, loss=LossConfig(chunk=chunk), **more)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("layout", "num_microbatches", "name"), CASES)
def test_bytes_and_flops_equal_those_without_chunks(layout, num_microbatches, name):
    run = prepared(layout, CHUNK, num_microbatches, **OTHERS.get(name, {}))
    assert cost_as_written(run) == cost_as_traced(run)
    assert cost_as_traced(run) == cost_as_traced(prepared(layout, "none", num_microbatches, **OTHERS.get(name, {})))
    assert run.traced_bytes == closed_form(run)


def test_planted_a_reduction_of_the_heads_gradient_in_each_chunk_is_seen(monkeypatch):
    """The count has an all-reduce of the head's gradient for each of the six chunks."""
    of_chunk = chunks._of_chunk
    run = prepared("data8", CHUNK)
    plain = cost_as_traced(run)[0]
    monkeypatch.setattr(
        chunks, "_of_chunk", lambda cost, x, head, *rest: of_chunk(cost, x, invariant(head, ("data",)), *rest)
    )
    head_bytes = math.prod(run.specs["head"].shape) * 4
    assert cost_as_traced(prepared("data8", CHUNK))[0]["data",] - plain["data",] == 6 * 2 * share(8, head_bytes)


# Memory -------------------------------------------------------------------------------------------------------------

VOCAB = 4096
# So narrow that a step holds the most while it has the logits, and not while it updates the parameters.
LARGE = Llama(num_layers=2, hidden_size=8, num_heads=4, intermediate_size=16, vocab_size=VOCAB)
LAYOUTS_OF_LARGE = [("data8", "manual"), ("zero3", "auto"), ("tensor4_sp", "manual"), ("data2_fsdp2_tensor2", "auto")]


@lru_cache
def large(layout: str, lowering: str, chunk: Any) -> tuple[Prepared, Step]:
    run = prepared(layout, chunk, lowering=lowering, model=LARGE)
    return run, run.compile_step()


def sizes_of_a_device(run: Prepared) -> tuple[int, int]:
    """Tokens and ids of the vocabulary on a device."""
    return ROWS * SEQ // run.ctx.shards("batch"), VOCAB // run.ctx.shards("vocab")


def largest_with_vocabulary(run: Prepared, step: Step) -> int:
    """Elements of the largest array in the compiled program with a dim as large as the local vocabulary."""
    _, width = sizes_of_a_device(run)
    shapes = [tuple(map(int, dims.split(","))) for dims in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", step.text)]
    return max(math.prod(shape) for shape in shapes if width in shape)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("layout", "lowering"), LAYOUTS_OF_LARGE)
def test_no_array_has_all_logits(layout, lowering):
    run, step = large(layout, lowering, CHUNK)
    all_logits = math.prod(sizes_of_a_device(run))
    assert largest_with_vocabulary(run, step) < all_logits
    assert largest_with_vocabulary(*large(layout, lowering, "none")) >= all_logits


@pytest.mark.parametrize(("layout", "lowering"), LAYOUTS_OF_LARGE)
def test_temporaries_shrink_by_what_auto_expects(layout, lowering):
    """All logits in float32 are replaced by those of a chunk and the sum of the head's gradients."""
    held = {
        chunk: large(layout, lowering, chunk)[1].compiled.memory_analysis().temp_size_in_bytes
        for chunk in (CHUNK, "none")
    }
    tokens, width = sizes_of_a_device(large(layout, lowering, CHUNK)[0])
    assert held["none"] - held[CHUNK] > 4 * (tokens - CHUNK - LARGE.hidden_size) * width > 0


@pytest.mark.parametrize("layout", ["data8", "zero3"])
def test_gspmd_reduces_the_heads_gradient_once(layout, monkeypatch):
    run, step = large(layout, "auto", CHUNK)
    plain = sent(*large(layout, "auto", "none"))
    assert sent(run, step) < 1.01 * plain
    monkeypatch.setattr(chunks, "_for_each_group", lambda head: head[None])  # control: a sum in every chunk
    monkeypatch.setattr(chunks, "constrain", lambda x, *dims: x)
    run = prepared(layout, CHUNK, lowering="auto", model=LARGE)
    assert sent(run, run.compile_step()) > 1.5 * plain


def sent(run: Prepared, step: Step) -> float:
    return float(total_sent_bytes(collectives_of(step.text, run.mesh)))


def test_a_small_model_has_the_program_without_chunks():
    run = prepared("data8", "auto")
    assert run.selected["loss.chunk"] == "one chunk: 8.00 KiB of logits"
    assert traced(run) == traced(prepared("data8", "none"))
    assert traced(run) != traced(prepared("data8", CHUNK))


def traced(run: Prepared) -> str:
    """The traced step as text, without the addresses of functions."""
    return re.sub("0x[0-9a-f]+", "", str(run._traced_step))


def test_the_reported_chunk_is_the_one_that_the_step_uses(monkeypatch):
    lengths = []
    summed = chunks._summed
    monkeypatch.setattr(
        chunks, "_summed", lambda cost, length, *rest: lengths.append(length) or summed(cost, length, *rest)
    )
    for lowering, layout in (("manual", "data2_fsdp2_tensor2"), ("auto", "tensor4_sp")):
        run = prepared(layout, 8, 2, lowering)
        run.compile_step()
        assert f"of {lengths.pop()} position" in run.selected["loss.chunk"]
