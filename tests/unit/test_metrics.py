"""What a run says of itself can be read again: by programs, by TensorBoard, by people."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from meshpar.errors import CheckpointError
from meshpar.train.metrics import FILE, flops_per_token, read, recorder, summary


def losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in read(run_dir / FILE) if record["kind"] == "train"]


def test_each_record_is_a_line_that_is_on_disk_at_once(tmp_path: Path):
    with recorder(tmp_path, 10, as_json=True) as to:
        to.begin(0, {"seed": 1})
        to.record("train", 1, loss=2.5, tokens=8)
        lines = (tmp_path / FILE).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"kind": "run", "step": 0, "config": {"seed": 1}},
        {"kind": "train", "step": 1, "loss": 2.5, "tokens": 8},
    ]


def test_json_on_standard_output_is_what_is_in_the_file_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with recorder(tmp_path, 10, as_json=True) as to:
        to.begin(0, {})
        to.record("train", 1, loss=2.5)
    assert capsys.readouterr().out == (tmp_path / FILE).read_text()


def test_a_resumed_run_leaves_out_the_steps_that_it_takes_again_but_keeps_their_lines(tmp_path: Path):
    for start, loss in ((0, 1.0), (2, 2.0)):
        with recorder(tmp_path, 4, as_json=True) as to:
            to.begin(start, {})
            for step in range(start + 1, 4):
                to.record("train", step, loss=loss)
    assert losses(tmp_path) == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert len((tmp_path / FILE).read_text().splitlines()) == 6


def test_control_two_runs_from_the_same_step_are_not_mixed(tmp_path: Path):
    for loss in (1.0, 2.0):
        with recorder(tmp_path, 4, as_json=True) as to:
            to.begin(0, {})
            to.record("train", 1, loss=loss)
    assert losses(tmp_path) == [(1, 2.0)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null_in_json_and_shown_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float
):
    def no_such_number(text: str) -> float:
        raise AssertionError(f"{text} is not JSON")

    with recorder(tmp_path, 10) as to:
        to.begin(0, {})
        to.record("train", 1, loss=value, skipped=1)
    line = (tmp_path / FILE).read_text().splitlines()[-1]
    assert json.loads(line, parse_constant=no_such_number)["loss"] is None
    assert f"loss {value:.4f}  skipped so far, as not finite: 1" in capsys.readouterr().out


def board_events(folder: Path) -> list[Event]:
    return [Event.FromString(data) for path in sorted(folder.iterdir()) for data in records_of(path)]


def records_of(path: Path) -> list[bytes]:
    """TFRecord: length, its checksum, data, its checksum."""
    data, records = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        records.append(data[12 : 12 + length])
        data = data[16 + length :]
    return records


def test_tensorboard_gets_each_number_and_is_told_which_steps_are_taken_again(tmp_path: Path):
    with recorder(tmp_path, 10, as_json=True) as to:
        to.begin(5, {"seed": 1})
        to.record("train", 6, loss=2.5, grad_norm=math.nan)
    events = board_events(tmp_path / "tensorboard")
    scalars = [(value.tag, event.step, value.simple_value) for event in events for value in event.summary.value]
    assert scalars == [("train/loss", 6, 2.5)]
    assert [event.step for event in events if event.session_log.status == SessionLog.START] == [6]


def test_people_who_are_no_terminal_read_a_line_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with recorder(tmp_path, 10) as to:
        to.begin(0, {})
        to.record("train", 1, loss=2.5, grad_norm=0.25, lr=1e-3, step_s=0.5, tokens_per_s=2048.0, mfu=0.413, skipped=0)
        to.record("evaluation", 1, loss=2.75, tokens=100)
        to.begin(1, {})
    assert (
        capsys.readouterr().out
        == """\
run        step      0  begins
train      step      1  loss 2.5000  norm 0.25  2,048 tokens/s  0.500 s/step  MFU 41.3%  lr 1.0e-03
evaluation step      1  loss 2.7500
run        step      1  goes on from a checkpoint
"""
    )


def test_a_terminal_shows_the_step_and_its_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    with recorder(tmp_path, 10) as to:
        to.begin(0, {})
        to.record("train", 7, loss=2.5)
        to.record("evaluation", 7, loss=2.75)
    shown = capsys.readouterr().out
    assert "7/10" in shown and "loss 2.5000" in shown and "evaluation step      7  loss 2.7500" in shown


def test_summary_of_nothing_finite_claims_nothing():
    records = [{"kind": "train", "step": 1, "loss": None}, {"kind": "evaluation", "step": 1, "loss": None}]
    assert summary(records) == {}


def test_summary_takes_the_median_speed():
    steps = [{"kind": "train", "step": i, "loss": 1.0, "step_s": s} for i, s in enumerate([0.1, 0.1, 9.0])]
    assert summary(steps)["step_s"] == 0.1


def test_only_the_first_process_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    with recorder(tmp_path, 10) as to:
        to.begin(0, {})
        to.record("train", 1, loss=1.0)
        to.summarize(1)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_a_run_directory_that_is_a_file(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError) as error, recorder(tmp_path / "file", 10):
        pass
    assert str(error.value) == f"run_dir: {tmp_path / 'file'} cannot be written: File exists"


def test_flops_of_a_model_that_was_counted_by_hand():
    """One layer of width 8, 2 heads of 4, mlp 16 (two matrices), a head of 32 tokens, 10 tokens of context.

    A token's matmuls are 4 x 8 x 8 + 2 x 8 x 16 + 8 x 32 = 768 multiply-adds, 6 operations each; its scores and the
    sum of values by them 2 x 8 multiply-adds for each of 10 tokens, half of them masked.
    """
    assert flops_per_token(768, 1, 10, 8) == 6 * 768 + 6 * (2 * 8 * 10 // 2)
