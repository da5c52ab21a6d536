"""Sweeps: grids from overrides, what is refused before anything runs, and what runs reach, fail, and go on with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from meshpar.errors import ConfigError
from meshpar.experiment.config import load
from meshpar.experiment.prepare import prepare
from meshpar.interop import user_code
from meshpar.sweep import grid, plot, recorded
from meshpar.sweep import sweep as sweeping
from meshpar.sweep.outcome import direction
from tests.command import CONFIG
from tests.tasks.test_examples import FOLDER as EXAMPLES

LIKE_TRAIN = """
import json, pathlib, sys
folder = pathlib.Path(json.loads(sys.argv[-1].removeprefix("run_dir=")))
config = json.loads((folder / "config.json").read_text())
with (folder / "starts").open("a") as starts:
    print("began", file=starts)
lr = config["optim"]["lr"]
if lr == 0.1:
    print("some lines")
    sys.exit("meshpar: step 3: it burst")
last = {"kind": "evaluation", "step": 2, "loss": None if lr == 0.5 else abs(lr - 0.02), "accuracy": lr, "tokens": 8}
records = [{"kind": "run", "step": 0, "config": config}, last, {"kind": "summary", "step": 2}]
(folder / "metrics.jsonl").write_text("".join(json.dumps(record) + chr(10) for record in records))
"""
"""Writes the records of a run, without training: the loss is lowest at a rate of 0.02."""


def swept(folder, *overrides, parallel=2, metric="loss", best="lowest"):
    """A sweep whose runs are `LIKE_TRAIN`."""
    config = folder / "config.yaml"
    config.write_text(CONFIG)
    fixed, points = grid.read(overrides)
    runs = {}
    for point in points:
        runs[point] = load(config, [*point.overrides, f"run_dir={folder / point.name}"])
        runs[point].run_dir.mkdir(exist_ok=True)
        (runs[point].run_dir / "config.json").write_text(runs[point].model_dump_json())
    command = (sys.executable, "-S", "-c", LIKE_TRAIN)
    return sweeping.Sweep(config, fixed, runs, None, metric, best, command).train(parallel)


def starts(folder):
    return {path.parent.name: len(path.read_text().split()) for path in folder.glob("*/starts")}


def test_a_sweep_names_its_best_run_and_trains_again_only_what_failed(tmp_path):
    found = swept(tmp_path, "optim.lr=[0.01,0.1,0.3,0.5]", "seed=[0,1]")
    assert str(found).splitlines()[:4] == [
        "  optim.lr  seed  step  loss",
        f"  0.01      0     2     0.0100      best: {tmp_path}/optim.lr=0.01,seed=0",
        "  0.01      1     2     0.0100",
        "  0.1       0     0     -           failed: meshpar: step 3: it burst",
    ]
    assert str(found).splitlines()[-1] == "  0.5       1     2     not finite"
    assert found.as_json()["best"]["values"] == {"optim.lr": 0.01, "seed": 0}
    assert found.as_json()["runs"][2]["why"] == "meshpar: step 3: it burst"
    again = swept(tmp_path, "optim.lr=[0.02,0.1,0.01]", "seed=[0,1]")
    assert again.winner is not None
    assert again.winner.point.values["optim.lr"] == 0.02
    assert starts(tmp_path) == {
        f"optim.lr={lr},seed={seed}": 2 if lr == 0.1 else 1 for lr in (0.01, 0.02, 0.1, 0.3, 0.5) for seed in (0, 1)
    }
    assert plot.draw(found, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_metric_that_no_run_has_ends_the_sweep(tmp_path):
    with pytest.raises(ConfigError, match=r"--metric acuracy: the evaluation of .* has none; did you mean accuracy\?"):
        swept(tmp_path, "optim.lr=[0.01,0.02]", metric="acuracy", best="highest", parallel=1)
    assert len(starts(tmp_path)) == 1


def test_the_direction_of_a_metric_is_known_or_asked_for():
    assert [direction(name, None) for name in ("loss", "accuracy", "recall_at_5")] == ["lowest", "highest", "highest"]
    assert direction("mine", "highest") == "highest"
    with pytest.raises(ConfigError, match="--metric mine: say which is better"):
        direction("mine", None)


REFUSED = {
    "no grid": (["num_steps=4"], "no key has several values"),
    "empty": (["seed=[]"], "seed=[]\n    has no values"),
    "twice": (["seed=[0,1,0]"], "has 0 twice"),
    "key twice": (["seed=[0,1]", "seed=2"], "is given twice"),
    "run_dir": (["run_dir=[a,b]"], "each run has a folder of its own"),
    "a list": (["rules=[fsdp,zero1]"], """rules='[["fsdp"], ["zero1"]]' for 2"""),
    "a list in a section": (["freeze=[a,b]"], "the key takes a list"),
    "a rule": (["rules.mlp=[tensor,fsdp]"], "the key takes a list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_grid_is_refused_with_the_rest(name):
    overrides, text = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        grid.read([*overrides, "num_microbatches=[]"])
    found = str(error.value)
    assert "num_microbatches=[]" in found
    assert name == "no grid" or text in found


def test_a_list_of_lists_is_a_grid_and_names_folders_that_can_be():
    _, points = grid.read(["rules=[[fsdp],[zero1,megatron]]", "data.path=['a b','../c']"])
    assert [point.values["rules"] for point in points[::2]] == [["fsdp"], ["zero1", "megatron"]]
    assert all(len(point.name) == 12 and point.name.isalnum() for point in points)
    assert len({point.name for point in points}) == 4


def test_bad_values_are_refused_before_anything_runs(command, monkeypatch, tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG + "run_dir: run\n")
    monkeypatch.chdir(tmp_path)
    said = command("sweep", "config.yaml", "optim.lr=[-1,1e-2]", "mesh.tensor=[2,3]", "--parallel", "2")
    assert said.code == 2
    assert "optim.lr=-1,mesh.tensor=2" in said.err
    assert "must be greater than 0.0, got -1" in said.err
    assert "optim.lr=0.01,mesh.tensor=3" in said.err
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(sweeping, "has_accelerator", lambda: True)
    said = command("sweep", "config.yaml", "optim.lr=[1e-3,1e-2]", "--parallel", "2")
    assert (said.code, "each run would take all accelerators" in said.err) == (2, True)


def test_each_run_of_a_sweep_has_a_mirror_of_its_own(tmp_path):
    """In one mirror a run would go on from the checkpoints of another."""
    (tmp_path / "config.yaml").write_text(CONFIG + "run_dir: run\ncheckpoints: {mirror: s3://bucket/sweep/}\n")
    fixed, points = grid.read(["seed=[0,1]", "optim.lr=0.01"])
    runs = sweeping._checked(tmp_path / "config.yaml", fixed, points, tmp_path, None, "loss")
    assert [run.checkpoints.mirror for run in runs.values()] == ["s3://bucket/sweep/seed=0", "s3://bucket/sweep/seed=1"]
    words = sweeping._overrides(fixed, points[0], tmp_path, runs[points[0]].checkpoints.mirror)
    assert 'checkpoints.mirror="s3://bucket/sweep/seed=0"' in words


@pytest.mark.parametrize(
    ("metric", "fix"),
    [("accuracy", "there are loss"), pytest.param("los", "did you mean loss?", marks=pytest.mark.slow)],
)
def test_a_metric_that_no_evaluation_records_is_refused_before_anything_is_trained(
    metric, fix, tmp_path, command, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(CONFIG + "run_dir: run\n")
    said = command("sweep", "config.yaml", "optim.lr=[1e-3,1e-2]", "--metric", metric, "--best", "lowest")
    assert said.code == 2 and not (tmp_path / "run").exists()
    assert f"--metric {metric}: no evaluation would record it; {fix}" in said.err


METRICS = {"house_prices": {"mse", "rmse", "mae", "r2"}, "clip_pairs": {"recall_at_1", "recall_at_5"}}


@pytest.mark.parametrize("name", ["house_prices", pytest.param("clip_pairs", marks=pytest.mark.slow)])
def test_the_metrics_of_an_example_are_known_before_it_is_trained(name, monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    user_code.name(EXAMPLES / f"{name}.py")
    run = load(f"{name}.yaml")
    assert recorded.metrics(prepare(run, run.mesh.abstract())) - {"scale"} == {"loss"} | METRICS[name]


@pytest.mark.slow
def test_a_sweep_that_is_stopped_goes_on(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG.replace("num_steps: 2", "num_steps: 300") + "run_dir: run\n")
    words = ["sweep", "config.yaml", "optim.lr=[1e-3,1e-2]", "loggers=[[]]", "log_every=1", "--parallel", "2", "--json"]
    command = [sys.executable, "-m", "meshpar", *words]
    first = subprocess.Popen(command, cwd=tmp_path)
    while not all('"step": 20' in (_text(path / "metrics.jsonl")) for path in _folders(tmp_path / "run", 2)):
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 75
    steps = [int(next((path / "checkpoints").iterdir()).name) for path in _folders(tmp_path / "run", 2)]
    assert all(20 <= step < 300 for step in steps)
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    found = json.loads(again.stdout)
    assert [run["step"] for run in found["runs"]] == [300, 300]
    assert found["best"] == min(found["runs"], key=lambda run: run["metrics"]["loss"])
    third = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(third.stdout) == found
    assert "begins" not in third.stderr


def _folders(folder, number):
    found = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
    return found if len(found) == number else [folder]


def _text(file):
    return file.read_text() if file.exists() else ""
