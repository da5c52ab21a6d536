"""Runs under faults learn what an undisturbed run learns, from the same batches; what would differ is found."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshpar.chaos.faults import FAULTS, plan
from meshpar.chaos.trial import Result, Setup, compare, disturbed, undisturbed
from meshpar.chaos.worker import seen
from meshpar.checkpoint.checkpoints import checkpoints
from meshpar.checkpoint.saved import find
from meshpar.experiment.config import load
from meshpar.launch.workers import Ended
from tests.command import exit_code

CONFIG = """
model: {kind: llama, num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 32}
data: {kind: synthetic, batch_size: 8, seq_len: 8}
optim: {kind: adamw, lr: 1e-2}
mesh: {data: 2, fsdp: 2}
num_steps: 20
run_dir: run
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chaos")
    (folder / "config.yaml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def printed(folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "meshpar", "chaos", "config.yaml", "--faults=kill,flip", "--seed=3", "--json"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_killed_process_and_a_flipped_bit_change_nothing(printed: subprocess.CompletedProcess[str]):
    assert printed.returncode == 0, printed.stderr
    report = json.loads(printed.stdout)
    assert sorted(fault["kind"] for fault in report["faults"]) == ["flip", "kill"]
    assert report["differences"] == []
    assert max(report["end_s"]) < 15
    assert "with exit code 137" in printed.stderr
    assert "copies of the same state differ:\n  |   device " in printed.stderr
    assert printed.stderr.count("starts again from ") == 2


@pytest.fixture(scope="module")
def recorded(folder: Path) -> Path:
    """The directory of an undisturbed run in this process, a seventh of the cost of the sample under faults."""
    words = ["mesh.fsdp=4", "checkpoints={every: 2}", "log_every=1", "loggers=[]"]
    assert exit_code("chaos-worker", folder / "config.yaml", f"run_dir={folder / 'recorded'}", *words) == 0
    return folder / "recorded"


def change_loss(run_dir: Path) -> None:
    file = run_dir / "metrics.jsonl"
    changed, count = re.subn(r'("kind": "train", "step": 7, .*"loss": )', r"\g<1>1", file.read_text())
    assert count
    file.write_text(changed)


def change_batch(run_dir: Path) -> None:
    file = run_dir / "batches-0.jsonl"
    file.write_text(file.read_text() + '{"step": 9, "rows": {"5": 1}}\n')


def change_parameter(run_dir: Path) -> None:
    saved = find(run_dir)
    state = {path: saved.on_host(path) for path in saved.meta["arrays"]}
    state["params.norm.scale"] = state["params.norm.scale"] + 2e-5
    shutil.rmtree(run_dir / "checkpoints")
    with checkpoints(run_dir / "checkpoints") as new:
        new.save(saved.step, state)


def remove_last_checkpoint(run_dir: Path) -> None:
    shutil.rmtree(find(run_dir).folder)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (change_loss, "loss of step 7 differs by "),
        (change_batch, "row 5 of the batch of step 9 differs"),
        (change_parameter, "parameter params.norm.scale differs by 2.0e-05"),
        (remove_last_checkpoint, "step last differs by"),
    ],
)
def test_control_what_differs_is_named(change: Any, difference: str, recorded: Path, tmp_path: Path):
    shutil.copytree(recorded, tmp_path / "changed")
    expected = Result(recorded, 1.0, Ended(0))
    found = Result(tmp_path / "changed", 1.0, Ended(0))
    assert compare(expected, found, num_planned=0).differences == []
    change(tmp_path / "changed")
    assert compare(expected, found, num_planned=0).differences[0].startswith(difference)


def test_control_faults_that_do_not_come_and_peers_that_end_late_are_named(recorded: Path):
    expected = Result(recorded, 1.0, Ended(0))
    assert compare(expected, replace(expected, end_s=[15.1]), num_planned=1).differences == [
        "only 0 of 1 faults came: the run is too short",
        "a process outlived a dead peer by 15.1 s, more than 15",
    ]


def test_a_seed_determines_the_faults():
    assert plan(list(FAULTS), 100, seed=5) == plan(list(FAULTS), 100, seed=5) != plan(list(FAULTS), 100, seed=6)
    assert sorted(fault.kind for fault in plan(list(FAULTS), 100, seed=5)) == sorted(FAULTS)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--faults=kill,flood"], "--faults flood: there are kill, stop, corrupt, full-disk, sigterm, slow, flip"),
        (["--processes=3"], "--processes 3 cannot share 4 devices: set --devices"),
        (["checkpoints.mirror=s3://b/run"], "begin from nothing; set checkpoints.mirror=null"),
    ],
)
def test_what_cannot_run_is_refused(words: list[str], told: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    assert exit_code("chaos", folder / "config.yaml", f"run_dir={folder / 'new'}", *words) == 2
    assert told in capsys.readouterr().err


SETTINGS = ["checkpoints={every: 6}", "eval_every=3", "check_replicas_every=6", "log_every=1", "loggers=[]"]


@pytest.fixture(scope="module")
def sixty_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Setup, Result]:
    folder = tmp_path_factory.mktemp("seeds")
    config = folder / "config.yaml"
    config.write_text(CONFIG)
    command = ["chaos-worker", str(config), "num_steps=60", *SETTINGS, "--devices=4"]
    setup = Setup(load(config, ["num_steps=60"]), command, 2, 4, folder)
    return setup, undisturbed(setup)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_three_random_faults_change_nothing(seed: int, sixty_steps: tuple[Setup, Result]):
    """The twenty seeds have each kind of fault at least five times."""
    setup, expected = sixty_steps
    kinds = random.Random(1000 + seed).choices(list(FAULTS), k=3)
    found = compare(expected, disturbed(setup, plan(kinds, 60, seed), seed), num_planned=3)
    assert found.differences == []


EIGHT_STEPS = """
model: {kind: llama, num_layers: 4, hidden_size: 24, num_heads: 2, intermediate_size: 48}
data: {kind: synthetic, batch_size: 24, seq_len: 8}
optim: {kind: adamw, lr: 1e-3}
mesh: {data: 2, fsdp: 4}
rules: [fsdp]
num_steps: 8
run_dir: run
"""


def train(folder: Path, num_processes: int, num_devices: int, *words: str) -> Path:
    """Trains in `folder/run` with so many devices in all, compiled as users compile."""
    config = folder / "config.yaml"
    settings = ["checkpoints={every: 4}", "log_every=1", "loggers=[]", f"--devices={num_devices}"]
    command = ["chaos-worker", str(config), *words, *settings]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_FLAGS")
        ended = Setup(load(config), command, num_processes, num_devices, folder).group(folder / "run").run()
    assert ended.code == 0, ended.why
    return folder / "run"


def begun(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(EIGHT_STEPS)
    return folder


def equal(expected: Path, found: Path) -> None:
    """Losses to 1e-6, batches to the bit."""
    losses = [Result(run_dir, 1.0, Ended(0)).losses() for run_dir in (expected, found)]
    assert losses[0].keys() == losses[1].keys()
    assert max(abs(losses[0][step] - losses[1][step]) for step in losses[0]) < 1e-6
    assert seen(expected) == seen(found)


@pytest.fixture(scope="module")
def one_by_eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(begun(tmp_path_factory.mktemp("one")), 1, 8)


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 4, 8])
def test_eight_devices_of_several_processes_compute_what_those_of_one_do(num_processes, one_by_eight, tmp_path):
    equal(one_by_eight, train(begun(tmp_path), num_processes, 8))


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the run, in four processes of two devices."""
    return train(begun(tmp_path_factory.mktemp("half")), 4, 8, "num_steps=4")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_processes", "num_devices", "words"),
    [
        (2, 4, ["mesh={data: 2, fsdp: 2}"]),
        (1, 8, []),
        (8, 8, []),
        (3, 3, ["mesh={fsdp: 3}"]),
        (2, 8, ["rules=[zero1]"]),
        (2, 8, ["rules=[zero2]"]),
        (2, 8, ["lowering=auto"]),
        (
            2,
            4,
            ["mesh={data: 2, pipe: 2}", "rules=[pipeline]", "parallel={pipeline: {kind: zb_h1, num_microbatches: 4}}"],
        ),
        (2, 4, ["mesh={pipe: 4}", "rules=[pipeline]", "parallel={pipeline: {kind: 1f1b, num_microbatches: 4}}"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_a_run_saved_by_four_processes_goes_on_in_others(
    num_processes, num_devices, words, half, one_by_eight, tmp_path
):
    begun(tmp_path)
    shutil.copytree(half, tmp_path / "run")
    equal(one_by_eight, train(tmp_path, num_processes, num_devices, *words))
