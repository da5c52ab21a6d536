"""Generate, verify and bench run in two processes, and print once what one process prints."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meshpar.launch.workers import Group
from meshpar.mesh import join
from tests.command import exit_code

CONFIG = """
model: {kind: llama, num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 32, vocab_size: 64}
data: {kind: synthetic, vocab_size: 64, batch_size: 8, seq_len: 8}
optim: {kind: adamw, lr: 1e-2}
mesh: {data: 2, fsdp: 4}
num_steps: 2
run_dir: run
loggers: []
"""
GENERATE = ("generate", "config.yaml", "--prompt=1 2 3", "--prompt=5", "--prompt=9 9", "--max-tokens=5", "--json")
BENCH = ("bench", "collectives", "--devices=4", "--size=4KiB", "--operation=all_to_all", "--json")
VERIFY = ("verify", "config.yaml", "mesh.fsdp=1", "--json")
WORKER = """
import json, os, sys
from meshpar import cli

def run(*words):
    sys.argv = ["meshpar", *words]
    try:
        cli.main()
    except SystemExit as ended:
        print("\\0", ended.code)

for words in json.loads(sys.argv[1]):
    run(*words)
"""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)
    assert exit_code("train", "config.yaml") == 0
    return tmp_path


@pytest.mark.slow
def test_two_processes_generate_bench_and_verify_what_one_does(run_dir, capfd):
    capfd.readouterr()
    assert exit_code(*GENERATE) == 0
    alone = json.loads(capfd.readouterr().out)
    verbs = [[*GENERATE, "mesh.fsdp=2"], BENCH, VERIFY]
    ended = Group([sys.executable, "-c", WORKER, json.dumps(verbs)], 2, run_dir).run()
    printed = [text for text in capfd.readouterr().out.split("\0") if "{" in text]
    assert ended.code == 0, ended.why
    generated, timed, verified = (json.loads(text[text.index("{") :]) for text in printed)
    assert generated["mesh"] == "data=2, fsdp=2"
    assert generated["completions"] == alone["completions"]
    assert timed["num_devices"] == 4
    assert verified["equal"]
    assert verified["mesh"] == {"data": 2}
    quiet = (run_dir / "process-1.log").read_text()
    assert quiet.count("\0 0") == len(verbs)
    assert "{" not in quiet


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun: apt-get install openmpi-bin")
@pytest.mark.parametrize(
    ("verb", "key", "value"),
    [
        ((*GENERATE, "mesh.fsdp=2"), "mesh", "data=2, fsdp=2"),
        (BENCH, "num_devices", 4),
        (VERIFY, "equal", True),
    ],
    ids=["generate", "bench", "verify"],
)
def test_mpirun_joins_the_processes_of_a_verb_by_itself(verb, key, value, run_dir):
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-m", "meshpar", *verb]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout[done.stdout.index("{") :])  # it is printed once, or this is no JSON
    assert found[key] == value


@pytest.mark.slow
def test_control_verify_sees_processes_that_start_from_different_parameters(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)
    script = f"{sys.executable} -m meshpar {' '.join(VERIFY)} seed=${join.PROCESS}"
    ended = Group(["bash", "-c", script], 2, tmp_path).run()
    printed = capfd.readouterr().out
    assert ended.code == 1
    assert not json.loads(printed[printed.index("{") :])["equal"]
