"""The records of a run can be read by programs, by TensorBoard and by people."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from meshpar.errors import CheckpointError, RunError
from meshpar.records.file import FILE, append, read
from meshpar.records.metrics import recorder, summary


def losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in read(run_dir / FILE) if record["kind"] == "train"]


def test_each_record_is_a_line_that_is_on_disk_at_once(tmp_path: Path):
    with recorder(tmp_path, 10, as_json=True) as to:
        to.begin(0, {"seed": 1})
        to.record("train", 1, loss=2.5, tokens=8)
        lines = (tmp_path / FILE).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"kind": "run", "step": 0, "config": {"seed": 1}, "began": to.began},
        {"kind": "train", "step": 1, "loss": 2.5, "tokens": 8},
    ]


def test_json_on_standard_output_is_exactly_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with recorder(tmp_path, 10, as_json=True) as to:
        to.begin(0, {})
        to.record("train", 1, loss=2.5)
    assert capsys.readouterr().out == (tmp_path / FILE).read_text()


def test_reading_skips_the_records_of_repeated_steps_but_the_file_keeps_them(tmp_path: Path):
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
def test_a_number_that_is_not_finite_is_null_in_json_and_shown_as_it_is(
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
    data = path.read_bytes()
    records = []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        records.append(data[12 : 12 + length])
        data = data[16 + length :]
    return records


def test_tensorboard_gets_each_finite_number_and_the_step_where_a_run_resumes(tmp_path: Path):
    with recorder(tmp_path, 10, as_json=True) as to:
        to.begin(5, {"seed": 1})
        to.record("train", 6, loss=2.5, grad_norm=math.nan)
    events = board_events(tmp_path / "tensorboard")
    scalars = [(value.tag, event.step, value.simple_value) for event in events for value in event.summary.value]
    assert scalars == [("train/loss", 6, 2.5)]
    assert [event.step for event in events if event.session_log.status == SessionLog.START] == [6]


def test_output_that_is_no_terminal_has_a_line_for_each_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
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
run        step      1  resumes from a checkpoint
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


def test_a_summary_shows_a_last_loss_that_is_not_finite_and_skipped_steps():
    first = {"kind": "train", "step": 1, "loss": 4.0, "skipped": 0}
    last = {"kind": "train", "step": 2, "loss": None, "skipped": 1}
    result = summary([first, last, {"kind": "evaluation", "step": 2, "loss": None}])
    assert (result["first_loss"], result["skipped"]) == (4.0, 1)
    assert math.isnan(result["last_loss"]) and math.isnan(result["held_out_loss"]) and math.isnan(result["lower_by"])
    assert summary([]) == {}


def test_an_unfinished_last_line_is_skipped_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with recorder(tmp_path, 10, as_json=True) as to:
        to.begin(0, {})
        to.record("train", 1, loss=1.0)
        to.record("train", 2, loss=2.0)
    whole = (tmp_path / FILE).read_bytes()
    for cut in (1, 20, len(whole.splitlines()[-1])):
        (tmp_path / FILE).write_bytes(whole[:-cut])
        kept = [(1, 1.0), (2, 2.0)] if cut == 1 else [(1, 1.0)]  # only the newline is missing
        assert losses(tmp_path) == kept
        with recorder(tmp_path, 10, as_json=True) as to:
            to.record("train", 3, loss=3.0)
        assert losses(tmp_path) == [*kept, (3, 3.0)]
    assert f"{tmp_path / FILE}: its last line was not finished and is cut off" in capsys.readouterr().err


def test_a_long_record_that_was_written_in_part_is_cut_off(tmp_path: Path):
    with recorder(tmp_path, 10, as_json=True) as to:
        to.begin(0, {})
        to.record("restored", 0, restored=["params.w"] * 5000)
    data = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(data[:8192])
    with recorder(tmp_path, 10, as_json=True):
        pass
    assert [record["kind"] for record in read(tmp_path / FILE)] == ["run"]


@pytest.mark.parametrize("line", ["{", "[]", "\0" * 30, '{"step": 1}', '{"kind": "train", "step": "1"}', "\xff"])
def test_any_other_broken_line_is_reported_by_its_number_and_the_file_is_left_alone(tmp_path: Path, line: str):
    text = f'{{"kind": "run", "step": 0}}\n{line}\n{{"kind": "train", "step": 1, "loss": 1.0}}\n'.encode("latin-1")
    (tmp_path / FILE).write_bytes(text)
    with pytest.raises(CheckpointError) as refused, recorder(tmp_path, 10, as_json=True):
        pass
    message = "is no record of a run\n    remove this line: no other line depends on it"
    assert str(refused.value) == f"the records of the run cannot be read:\n  {tmp_path / FILE}:2\n    {message}"
    assert (tmp_path / FILE).read_bytes() == text


class Full(io.FileIO):
    """A file on a disk that has `room` bytes left."""

    room = 0

    def write(self, data: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().write(bytes(data)[: self.room])
        self.room -= written
        return written


def test_a_full_disk_is_reported_in_one_line_and_leaves_no_half_record(tmp_path: Path):
    file = tmp_path / FILE
    with Full(file, "a") as lines:
        lines.room = 60
        append(file, lines, {"kind": "train", "step": 1, "loss": 1.0})
        with pytest.raises(RunError) as refused:
            append(file, lines, {"kind": "train", "step": 2, "loss": 2.0})
    fix = "free some space; the same command then resumes from the last checkpoint"
    assert str(refused.value) == f"a record cannot be written to {file}: No space left on device; {fix}"
    assert refused.value.exit_code == 1
    assert (file.read_bytes().count(b"\n"), losses(tmp_path)) == (1, [(1, 1.0)])


def test_a_run_directory_that_was_removed_is_reported(tmp_path: Path):
    with recorder(tmp_path / "run", 10, as_json=True) as to:
        to.begin(0, {})
        (tmp_path / "run").rename(tmp_path / "gone")
        with pytest.raises(RunError, match="was the folder moved or removed while the run wrote to it"):
            to.record("train", 1, loss=1.0)


def record_once(run_dir: Path) -> None:
    with recorder(run_dir, 10, as_json=True) as to:
        to.begin(0, {})
        to.record("train", 1, loss=1.0)


def test_tensorboard_on_a_full_disk_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(self: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tensorboardX.event_file_writer.EventsWriter.flush", full)
    with pytest.raises(RunError) as refused:
        record_once(tmp_path)
    assert str(refused.value).startswith(
        f"TensorBoard's events cannot be written to {tmp_path / 'tensorboard'}: No space"
    )


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


def test_a_run_directory_that_is_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError) as error, recorder(tmp_path / "file", 10):
        pass
    assert str(error.value) == f"run_dir: {tmp_path / 'file'} cannot be written: File exists"
