"""`meshpar launch --slurm`: the script, run by bash with stand-ins for Slurm's commands, and its errors."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from meshpar.checkpoint import lock

CONFIG = """
model: {kind: llama, num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 32}
data: {kind: synthetic, batch_size: 8, seq_len: 8}
optim: {kind: adamw, lr: 1e-2}
mesh: {data: 8}
num_steps: 12
run_dir: run
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("my config.yaml").write_text(CONFIG)
    return "my config.yaml"


def stand_in(name: str, code: int = 0) -> None:
    """A command that notes its arguments, one a line."""
    path = Path("bin", name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/bash\nprintf "%s\\n" {name} "$@" >> called\nexit {code}\n')
    path.chmod(0o755)


@pytest.mark.parametrize(("code", "last"), [(0, "num_steps=20"), (75, "7"), (1, "num_steps=20")])
def test_the_job_is_requeued_after_a_signal_alone(command, config, code, last):
    """75 is the exit code of a run that a signal ended, with a checkpoint."""
    options = ("--slurm", "--nodes=2", "--processes=4", "--dry-run")
    said = command("launch", *options, "--", "train", config, "num_steps=20")
    assert said.code == 0
    stand_in("srun", code)
    stand_in("scontrol")
    environment = {"PATH": f"{Path('bin').absolute()}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "-c", said.out], env=environment, check=False)
    called = Path("called").read_text().splitlines()
    assert done.returncode == code
    assert called[:1] + called[3:7] == ["srun", "meshpar", "train", "my config.yaml", "num_steps=20"]
    assert called[-1] == last


def test_options_of_sbatch_are_passed_on(command, config):
    words = ("--slurm", "--processes=8", "--sbatch=--partition=long", "--sbatch=--gpus-per-node=8", "--dry-run")
    script = command("launch", *words, "--", "train", config).out
    assert "#SBATCH --partition=long\n#SBATCH --gpus-per-node=8\n" in script
    assert "#SBATCH --ntasks-per-node=8\n" in script


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--processes=2", "--dry-run"], "--dry-run: for a scheduler's job; add --slurm or --k8s"),
        (
            ["--processes=3"],
            "3 processes cannot share the 8 devices of the mesh evenly; choose a number",
        ),
        (["--processes=2", "--nodes=3", "--slurm"], "6 processes cannot share the 8 devices of the mesh evenly"),
        (["--processes=2", "--slurm"], "--slurm: sbatch is not on PATH; --dry-run prints the script"),
    ],
)
def test_options_that_do_not_fit_are_refused(command, config, monkeypatch, words, told):
    monkeypatch.setenv("PATH", "")
    said = command("launch", *words, "--", "train", config)
    assert said.code == 2
    assert told in said.err
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--", "explain", "my config.yaml"], "launch explain: only train, generate, verify, inspect and bench run in"),
        (["--restarts=1", "--", "verify", "my config.yaml"], "--restarts: verify has no checkpoints to start from"),
        (["--devices=2", "--", "verify", "my config.yaml"], "--devices: verify simulates as many as its small mesh"),
        (["--", "bench", "collectives", "--devices=5"], "2 processes cannot share the 5 devices of the mesh evenly"),
        (["--", "generate", "my config.yaml", "--prompt=1"], "an untrained model cannot generate"),
        (["--", "train", "none.yaml"], "none.yaml"),
    ],
)
def test_a_command_that_cannot_run_is_refused_before_any_process_starts(command, config, words, told):
    said = command("launch", "--processes=2", *words)
    assert said.code == 2
    assert told in said.err
    assert not Path("logs").exists()


def test_a_port_in_use_is_refused_before_any_process_starts(command, config):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = command("launch", "--processes=2", f"--port={port}", "--", "train", config)
    assert said.code == 2
    assert f"the first process cannot listen at 127.0.0.1:{port}: Address already in use; choose another" in said.err
    assert not Path("run").exists()


def test_an_interface_of_another_machine_is_refused(command, config):
    said = command("launch", "--processes=2", "--host=192.0.2.1", "--", "train", config)
    assert said.code == 2
    assert "the first process cannot listen at 192.0.2.1:0: Cannot assign requested address" in said.err


def test_a_run_dir_that_another_run_holds_is_refused_and_its_logs_are_left_alone(command, config):
    with lock.hold(Path("run")):
        said = command("launch", "--processes=2", "--", "train", config)
    assert said.code == 2
    assert "run_dir: run is in use by process" in said.err
    assert not Path("run/logs").exists()
    lock.check_unheld(Path("run"))
