"""Of the trainer's settings only a teacher sends anything: its closed form, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from meshpar.experiment.prepare import Prepared, prepare
from meshpar.optim import AdamW
from meshpar.optim.freeze import Freeze
from meshpar.sharding.rules import AxisRules
from meshpar.train.loss import Distill, LossConfig
from meshpar.train.step import Step
from tests.errors.test_trainer_errors import teacher
from tests.program import oracle, test_chunked_loss
from tests.program.oracle import closed_form
from tests.program.test_bytes import prepared, sent_as_written

ADDED = {
    "loss": LossConfig(label_smoothing=0.1, z_loss=1e-3),
    "optim": AdamW(lr=1e-3, ema=0.99),
    "freeze": (Freeze(paths=("blocks.attn.**",), until=3),),
}
CASES = [  # layout, microbatches, presets of the teacher
    ("data2_fsdp2_tensor2", 1, ("fsdp", "megatron")),
    pytest.param("tensor4", 2, ("megatron_sp",), marks=pytest.mark.slow),
    pytest.param("zero1", 4, ("fsdp",), marks=pytest.mark.slow),
    pytest.param("zero3", 1, ("fsdp",), marks=pytest.mark.slow),
    pytest.param("zero2", 2, ("zero2",), marks=pytest.mark.slow),
]


def taught(layout: str, num_microbatches: int, presets: tuple[str, ...]) -> Prepared:
    teacher(vocab_size=32)
    distill = Distill(teacher="teacher", rules=AxisRules(preset=presets))
    return prepare(prepared(layout, "manual", num_microbatches).run.model_copy(update=ADDED | {"distill": distill}))


@pytest.mark.parametrize(("layout", "num_microbatches", "presets"), CASES)
def test_a_step_with_a_teacher_sends_the_closed_form(tmp_path, monkeypatch, layout, num_microbatches, presets):
    monkeypatch.chdir(tmp_path)
    run = taught(layout, num_microbatches, presets)
    plain = prepared(layout, "manual", num_microbatches).traced_bytes or {}
    found = sent_as_written(run)
    assert found == run.traced_bytes == closed_form(run)
    assert sum(found.values()) > sum(plain.values())
    monkeypatch.setattr(oracle, "teacher_traffic", lambda *given: {})  # control: the teacher's bytes are needed
    assert closed_form(run) == plain != found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data2_fsdp2_tensor2", "zero1"])
def test_without_a_teacher_the_settings_send_nothing(layout):
    plain = prepared(layout)
    run = prepare(plain.run.model_copy(update=ADDED))
    assert sent_as_written(run) == plain.traced_bytes == run.traced_bytes


def test_with_a_teacher_of_another_sharding_the_traced_bytes_are_unknown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rules = AxisRules(preset=("fsdp", "megatron"), vocab=())
    teacher(vocab_size=32)
    run = prepared("data2_fsdp2_tensor2").run.model_copy(update={"distill": Distill(teacher="teacher", rules=rules)})
    assert prepare(run).traced_bytes is None


# Memory -------------------------------------------------------------------------------------------------------------


def in_chunks_of(chunk: Any) -> tuple[Prepared, Step]:
    """A step with a teacher; both models have a large vocabulary."""
    layout = "data2_fsdp2_tensor2"
    student = test_chunked_loss.prepared(layout, chunk, model=test_chunked_loss.LARGE)
    distill = Distill(teacher="teacher", rules=AxisRules(preset=("fsdp", "megatron")))
    run = prepare(student.run.model_copy(update={"distill": distill}))
    return run, run.compile_step()


def test_no_array_has_all_logits_of_a_teacher_or_its_student(tmp_path, monkeypatch):
    """Control: without chunks there is such an array, and the temporaries have room for one of each model."""
    monkeypatch.chdir(tmp_path)
    teacher(vocab_size=test_chunked_loss.VOCAB)
    run, step = in_chunks_of(test_chunked_loss.CHUNK)
    whole = in_chunks_of("none")
    tokens, width = test_chunked_loss.sizes_of_a_device(run)
    assert test_chunked_loss.largest_with_vocabulary(run, step) < tokens * width
    assert test_chunked_loss.largest_with_vocabulary(*whole) >= tokens * width
    less, more = (step.compiled.memory_analysis().temp_size_in_bytes for step in (step, whole[1]))
    saved = 4 * (2 * (tokens - test_chunked_loss.CHUNK) - test_chunked_loss.LARGE.hidden_size) * width
    assert more - less > saved > 0
