"""`meshpar watch`: a run as its files show it."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from meshpar.checkpoint import lock
from meshpar.mesh.cursor import CURSORS, Cursor, Position
from meshpar.train import watch
from meshpar.train.watch import Watch, chart, straggler


def write_run(run_dir: Path, ends: bool = False) -> None:
    """A run of four processes that began 100 s ago and again at step 10; step 30 of 50 is logged."""
    began = (datetime.now(UTC) - timedelta(seconds=100)).isoformat()
    steps = [{"kind": "train", "step": step, "loss": 4.0 - step / 10, "step_s": 2.0} for step in range(11, 31)]
    first = {"kind": "run", "step": 0, "began": began, "config": {"num_steps": 50}}
    records = [first, {"kind": "train", "step": 1, "loss": 4.0}, first | {"step": 10}, *steps]
    if ends:
        records.append({"kind": "summary", "step": 30, "goodput": 0.25})
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (run_dir / "checkpoints/20").mkdir(parents=True)
    for index, step in enumerate((33, 33, 31, 33)):
        Cursor(run_dir / CURSORS / str(index)).at(step, "reads data" if index == 2 else "trains")


def test_a_run_is_shown_by_its_files(command, tmp_path: Path, monkeypatch):
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert command("watch", ".", "--once").out.startswith(".: step 30 of 50, not running, 1 restarts, goodput ")
    with lock.hold(tmp_path):
        shown = command("watch", ".", "--once").out
    assert shown.startswith(".: step 30 of 50, 0:00:40 left, 1 restarts, goodput ")
    assert "loss 1.0000  2.000 s/step" in shown
    assert "last checkpoint: step 20, 0:00:0" in shown
    table = [line.split() for line in shown.splitlines()[-4:]]
    assert [row[:2] for row in table] == [["0", "33"], ["1", "33"], ["2", "31"], ["3", "33"]]
    assert table[2][2:4] == ["reads", "data"]


def test_a_run_that_ended_says_so(command, tmp_path: Path, monkeypatch):
    write_run(tmp_path, ends=True)
    monkeypatch.chdir(tmp_path)
    assert command("watch", ".", "--once").out.startswith(".: step 30 of 50, ended, 1 restarts, goodput 25.0%\n")


def test_the_process_that_the_others_wait_for_is_named(tmp_path: Path):
    from rich.console import Console

    write_run(tmp_path)
    watched = Watch(tmp_path)
    console = Console(width=200)
    with console.capture() as printed:
        for _ in range(watch.LOOKS):
            console.print(watched.look())
    assert "31    reads data  0.0 s  the others wait for it" in printed.get()


def test_a_single_look_names_nobody(command, tmp_path: Path):
    write_run(tmp_path)
    assert "wait for it" not in command("watch", tmp_path, "--once").out


def drawn(rng: random.Random, slow: int | None) -> dict[int, Position]:
    """Positions of four processes that are up to two steps apart, or where one is behind."""
    return {index: Position(10 if index == slow else rng.randint(11, 12), "trains", 0.1) for index in range(4)}


@pytest.mark.parametrize("slow", [None, 0, 3])
@pytest.mark.parametrize("seed", range(5))
def test_a_process_that_is_behind_by_chance_is_not_named(seed: int, slow: int | None):
    rng = random.Random(seed)
    assert straggler([drawn(rng, slow) for _ in range(watch.LOOKS)]) == slow


def test_a_chart_falls_with_its_values():
    lines = chart([8.0 - i for i in range(8)]).splitlines()
    assert [len(line) - 9 for line in lines] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert chart([1.0] * 500)  # longer than it is wide, and flat


def test_a_folder_that_is_no_run_is_refused(command, tmp_path: Path):
    said = command("watch", tmp_path)
    assert said.code == 2
    assert "has no metrics.jsonl: is it the run_dir of a run that has begun?" in said.err
