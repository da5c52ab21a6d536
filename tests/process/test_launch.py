"""Processes of this machine train together as one process does, end together, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshpar.errors import MeshError
from meshpar.launch import workers
from meshpar.mesh import join

CONFIG = """
model: {kind: llama, num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 32}
data: {kind: synthetic, batch_size: 8, seq_len: 8}
optim: {kind: adamw, lr: 1e-2}
mesh: {data: 2, fsdp: 2}
num_steps: 12
log_every: 1
loggers: []
"""
LIMIT_S = 240


def losses(run_dir: Path) -> dict[int, float]:
    """step -> loss, the last one where a step was repeated."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}


def meshpar(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "meshpar", *words]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def launch(processes: int, *words: str) -> subprocess.Popen[str]:
    return meshpar("launch", f"--processes={processes}", f"--devices={4 // processes}", "--logs=logs", "--", *words)


def ends(process: subprocess.Popen[str], code: int = 0) -> str:
    """What a process printed, after it ended with the code."""
    try:
        printed = process.communicate(timeout=LIMIT_S)[0]
    finally:
        process.kill()
    assert process.returncode == code, printed
    return printed


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)
    return "config.yaml"


def worker_of(launcher: int, index: int) -> int:
    """The process number of a worker; waits until it trains."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                is_child = f"PPid:\t{launcher}\n" in (folder / "status").read_text()
                if is_child and f"{join.PROCESS}={index}\0" in (folder / "environ").read_text():
                    return int(folder.name)
            except (OSError, UnicodeDecodeError):
                continue
        time.sleep(0.1)
    raise AssertionError(f"no process {index}")


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_two_processes_train_as_one_and_a_signal_to_one_ends_both_with_a_checkpoint(config):
    ends(meshpar("train", config, "run_dir=one", "--devices=4"))
    running = launch(2, "train", config, "run_dir=two", "num_steps=100000")
    record = Path("two/metrics.jsonl")
    wait_for(lambda: record.exists() and '"step": 3,' in record.read_text())
    os.kill(worker_of(running.pid, 1), signal.SIGTERM)
    printed = ends(running, code=75)
    assert "stopped by" in printed
    at = int(printed.split(" at step ")[1].split(";")[0])
    assert Path(f"two/checkpoints/{at}").is_dir()
    expected = losses(Path("one"))
    found = losses(Path("two"))
    assert all(abs(found[step] - expected[step]) < 1e-6 for step in range(1, min(at, 12) + 1))


def test_one_that_is_killed_ends_the_others(config):
    running = launch(2, "train", config, "run_dir=run", "num_steps=100000")
    record = Path("run/metrics.jsonl")
    wait_for(lambda: record.exists() and '"step": 3,' in record.read_text())
    worker = worker_of(running.pid, 1)
    began = time.monotonic()
    os.kill(worker, signal.SIGKILL)
    assert "process 1 ended first, with exit code 137" in ends(running, code=137)
    assert time.monotonic() - began < 15


STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
FAILS = "import sys, time; time.sleep(0.5); print('no more paper'); sys.exit(3)"
WORKER = f"""
import os
if os.environ["{join.PROCESS}"] == "1":
    {FAILS}
else:
    {STUBBORN}
"""


def test_the_first_failure_is_quoted_and_a_process_that_stays_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "GRACE_S", 0.5)
    ended = workers.run([sys.executable, "-c", WORKER], 3, tmp_path)
    assert (ended.code, ended.worker and ended.worker.index, ended.killed) == (3, 1, [0, 2])
    assert str(ended).splitlines()[-1] == "  | no more paper"


ALONE = """
import time, sys
from meshpar.mesh import join
join._end_with_launcher()
print("waits", flush=True)
time.sleep(600)
"""
LAUNCHER = "import sys; from pathlib import Path; from meshpar.launch import workers; "
LAUNCHER += "workers.run([sys.executable, '-c', sys.argv[1]], 2, Path(sys.argv[2]))"


def test_no_process_outlives_a_launcher_that_is_killed(tmp_path):
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, ALONE, str(tmp_path)], stdout=subprocess.PIPE)
    children = [worker_of(launcher.pid, index) for index in range(2)]
    log = tmp_path / "process-1.log"
    wait_for(lambda: log.exists() and "waits" in log.read_text())
    assert launcher.stdout
    launcher.stdout.readline()
    launcher.kill()
    launcher.communicate(timeout=LIMIT_S)
    wait_for(lambda: not any(is_alive(child) for child in children))


def is_alive(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({join.NUM_PROCESSES: "2", join.PROCESS: "2"}, "they are numbered from 0 to 1"),
        ({join.NUM_PROCESSES: "two", join.PROCESS: "0"}, f"{join.NUM_PROCESSES}=two: a number is expected"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(monkeypatch, variables, told):
    for name, value in ({join.COORDINATOR: "127.0.0.1:1"} | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeshError, match=told):
        join.place()


def test_a_port_in_use_is_refused(monkeypatch):
    import socket

    with socket.socket() as taken:
        taken.bind((workers.LOOPBACK, 0))
        taken.listen()
        address = f"{workers.LOOPBACK}:{taken.getsockname()[1]}"
        for name, value in join.Place("meshpar launch", 2, 0, address).variables().items():
            monkeypatch.setenv(name, value)
        with pytest.raises(MeshError, match=r"cannot listen at .*: Address already in use; choose another with --port"):
            join.join()
