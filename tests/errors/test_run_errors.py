"""Runs that fail, are stopped or train nothing: their messages, their exit codes, and what is left on disk."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer

from meshpar.records.file import read
from tests.command import Said

CONFIG = """\
model: {kind: llama, num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 32, vocab_size: 64}
data: {kind: synthetic, vocab_size: 64, batch_size: 8, seq_len: 16, num_documents: 64}
optim: {kind: adamw, lr: 0.01}
mesh: {data: 8}
num_steps: 20
log_every: 1
run_dir: run
"""
LAUNCHED = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@pytest.fixture
def train(command, monkeypatch, tmp_path) -> Callable[..., Said]:
    """Runs `meshpar train config.yaml WORDS` in a folder of its own."""

    def leave(code: int, text: str) -> NoReturn:
        typer.echo(f"meshpar: {text}", err=True)
        raise typer.Exit(code)

    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules["meshpar.cli.app"], "leave", leave)
    for variable in LAUNCHED:
        monkeypatch.delenv(variable, raising=False)
    return lambda *words: command("train", "config.yaml", *words)


@pytest.fixture
def never_compiles(monkeypatch) -> None:
    def compile_step(self: Any) -> NoReturn:
        raise AssertionError("the step was compiled")

    monkeypatch.setattr("meshpar.train.training.Training.compile_step", compile_step)


def losses(run_dir: str | Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in read(Path(run_dir) / "metrics.jsonl") if "lr" in record]


def test_a_run_reports_its_start_its_end_and_that_nothing_was_trained(train):
    result = train("num_steps=2")
    start, compiling, *end = result.err.splitlines()
    assert start == "8 simulated cpu devices in 1 process; mesh data=8; 4,656 parameters; 128 tokens a step"
    assert compiling.startswith("compiling the step: ")
    assert end == ["trained to step 2: the checkpoint is run/checkpoints/2", "next: meshpar checkpoint show run"]
    again = train("num_steps=2", "optim.lr=0.5")
    assert again.code == 0
    assert again.err.splitlines()[2:] == [
        "meshpar: nothing was trained: run holds a run that ended at step 2",
        "  changed since then: optim.lr was 0.01, is 0.5",
        "  run_dir=... starts a new run; num_steps=..., above 2, continues the old one",
    ]
    other = train("num_steps=2", "optim.kind=lion", "optim.lr=0.01")
    assert other.code == 2
    assert "holds another optimizer" in other.err and "run_dir=... makes this a run of its own" in other.err
    assert "optim.kind\n    adamw in the checkpoint, lion in this run" in other.err


def test_a_run_that_diverges_fails_and_prints_only_json_to_standard_output(train):
    result = train("optim.lr=1e9", "--json")
    assert result.code == 1
    message = "the run stopped after step 11: loss or gradients were not finite in 10 steps in a row, from step 2 on"
    assert result.err.startswith(f"meshpar: {message}, and each was skipped; ")
    assert {json.loads(line)["kind"] for line in result.out.splitlines()} == {"run", "train"}
    assert list(Path("run/checkpoints").iterdir()) == []


@pytest.mark.usefixtures("never_compiles")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dump-hlo", "no/such/x"], "--dump-hlo no/such/x: cannot be written: No such file or directory"),
        (["--dump-hlo", "."], "--dump-hlo .: cannot be written: it is a folder"),
        (["--profile", "/dev/null/x"], "--profile /dev/null/x: cannot be made: Not a directory"),
    ],
)
def test_an_output_that_cannot_be_written_is_reported_before_anything_is_compiled(train, words, message):
    assert train(*words) == (2, "", f"meshpar: {message}\n")
    assert not Path("run").exists()


@pytest.mark.usefixtures("never_compiles")
def test_a_broken_record_is_reported_before_anything_is_compiled(train):
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text('{"kind": "run", "step": 0}\n{"kind"\n{"kind": "run", "step": 0}\n')
    message = "run/metrics.jsonl:2\n    is no record of a run\n    remove this line: no other line depends on it"
    assert train() == (2, "", f"meshpar: the records of the run cannot be read:\n  {message}\n")


@pytest.mark.usefixtures("never_compiles")
@pytest.mark.parametrize("variable", LAUNCHED)
def test_processes_that_a_launcher_started_and_nobody_joined_are_refused(train, monkeypatch, variable):
    monkeypatch.setenv(variable, "2")
    result = train()
    assert result.code == 2
    assert f"started 2 processes ({variable}=2), and they are not joined: each would be a separate run" in result.err
    assert not Path("run").exists()


@pytest.mark.parametrize(
    "environment",
    [{"SLURM_NTASKS": "1"}, {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}, {"OMPI_COMM_WORLD_SIZE": "1"}],
)
def test_control_one_process_of_a_launcher_trains(train, monkeypatch, environment):
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr("meshpar.experiment.fit_run.result", lambda steps: None)
    assert train().code == 0


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    (tmp_path / "disk").mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path / "disk"], capture_output=True)
    if mounted.returncode:
        pytest.skip("a file system cannot be mounted here")
    yield tmp_path / "disk"
    subprocess.run(["umount", "-l", tmp_path / "disk"], check=True)


LONG = ("num_steps=100", "checkpoints={every: 20, keep: 100}")
_whole: list[tuple[int, float]] = []


def losses_of_an_unbroken_run(train: Callable[..., Said]) -> list[tuple[int, float]]:
    """The run is the same for all tests, so it is trained once."""
    if not _whole:
        assert train(*LONG, "run_dir=whole").code == 0
        _whole.extend(losses("whole"))
    return _whole


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax, whose event loop is closed
def test_a_full_disk_is_reported_in_one_line_and_the_run_resumes_when_there_is_room(train, small_disk):
    filler = small_disk / "filler"
    filler.write_bytes(bytes(600_000))
    result = train(*LONG, "run_dir=disk/run")
    line = result.err.splitlines()[-1].replace(f"{Path.cwd()}/", "")
    message = (
        "(a record|a checkpoint|TensorBoard's events) cannot be written to disk/run/[a-z.]+: No space left on device"
    )
    assert result.code == 1
    assert re.fullmatch(f"meshpar: {message}; free some space; the same command then resumes from .*", line), line
    assert "Traceback" not in result.err
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,size=50m", small_disk], check=True)
    assert train(*LONG, "run_dir=disk/run").code == 0
    assert losses("disk/run") == losses_of_an_unbroken_run(train)


def test_sigterm_ends_the_command_with_75_and_a_checkpoint_and_the_same_command_resumes(train):
    command = [sys.executable, "-c", "from meshpar.cli import main; main()", "train", "config.yaml", *LONG]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout and process.stderr
            while "step      5 " not in process.stdout.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            line = process.communicate(timeout=60)[1].splitlines()[-1]
        finally:
            process.kill()
    saved = max(int(path.name) for path in Path("run/checkpoints").iterdir())
    where = f"checkpoint in run/checkpoints/{saved}"
    assert process.returncode == 75
    assert line == f"meshpar: stopped by SIGTERM at step {saved}; {where}; the same command resumes from it"
    assert train(*LONG).code == 0
    assert losses("run") == losses_of_an_unbroken_run(train)
