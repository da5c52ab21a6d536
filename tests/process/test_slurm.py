"""A real Slurm, with two nodes on this machine, runs what `meshpar launch --slurm` submits, and requeues it."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from meshpar.launch.workers import free_port
from tests.command import Said, exit_code
from tests.waiting import wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "scancel")
missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)}: apt-get install slurm-wlm"),
]

NODES = ("127.0.0.1", "127.0.0.2")
"""Names that every host resolves."""
SETTINGS = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SlurmdParameters=config_overrides
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=all Nodes=ALL Default=YES State=UP
"""
CONFIG = """
model: {kind: llama, num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 32}
data: {kind: synthetic, batch_size: 8, seq_len: 8}
optim: {kind: adamw, lr: 1e-4}
mesh: {data: 2, fsdp: 2}
num_steps: 200
log_every: 1
run_dir: run
loggers: []
"""


def asked(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


@contextmanager
def daemon(*words: str) -> Iterator[None]:
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cluster that listens on loopback alone."""
    folder = tmp_path_factory.mktemp("slurm")
    for parent in (folder, *folder.parents):  # munge refuses sockets that others cannot reach
        if parent.stat().st_uid == os.getuid():
            parent.chmod(parent.stat().st_mode | 0o055)
    ports = [free_port() for _ in range(3)]
    text = SETTINGS.format(
        host=socket.gethostname().partition(".")[0], user=getpass.getuser(), folder=folder, ports=ports, nodes=NODES
    )
    (folder / "slurm.conf").write_text(text.lstrip())
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    (folder / "state").mkdir()
    names = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
    files = [f"--{option}={folder / name}" for option, name in (names | {"seed-file": "munged.seed"}).items()]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        patch.setenv("PATH", f"{os.environ['PATH']}:/usr/sbin")
        stack.enter_context(daemon("munged", "--foreground", "--force", *files))
        wait_for((folder / "munge.socket").exists)
        stack.enter_context(daemon("slurmctld", "-D", "-i"))
        for node in NODES:
            (folder / f"spool-{node}").mkdir()
            stack.enter_context(daemon("slurmd", "-D", "-N", node))
        wait_for(lambda: asked("sinfo", "--noheader", "--states=idle", "--format=%D").strip() == "2")
        yield
        asked("scancel", "--signal=KILL", f"--user={getpass.getuser()}")
        wait_for(lambda: not asked("squeue", "--noheader"))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)
    return "config.yaml"


def losses(run_dir: str) -> dict[int, float]:
    records = map(json.loads, Path(run_dir, "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}


def test_a_job_on_two_nodes_is_requeued_after_a_signal_and_learns_what_one_process_does(slurm, command, config):
    said: Said = command("launch", "--slurm", "--nodes=2", "--processes=1", "--", "train", config)
    assert said.code == 0, said.err
    job = said.out.split()[-1]
    wait_for(lambda: Path("run/metrics.jsonl").exists() and losses("run").keys() >= {10})
    asked("scancel", f"--signal={signal.Signals.SIGUSR1.name[3:]}", job)
    wait_for(lambda: "Requeue" in asked("scontrol", "show", "job", job) and list(Path("run/checkpoints").glob("*")))
    # Slurm begins a requeued job two minutes later, unless it is told to: seconds later, or the old credentials count.
    wait_for(lambda: "JobState=PENDING" in asked("scontrol", "show", "job", job))
    time.sleep(3)
    asked("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_for(lambda: not asked("squeue", "--noheader"))
    kinds = [json.loads(line)["kind"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert kinds.count("restored") == 1
    assert kinds.count("summary") == 1
    assert "in 2 processes" in Path("run/logs/process-0.log").read_text()
    found = losses("run")
    assert exit_code("train", config, "run_dir=one", "--devices=4") == 0
    expected = losses("one")
    assert found.keys() == expected.keys()
    assert max(abs(found[step] - expected[step]) for step in expected) < 1e-6


def test_srun_joins_the_processes_by_itself(slurm, config):
    words = ["srun", "--nodes=2", "--ntasks=4", "meshpar", "verify", config, "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout[done.stdout.index("{") :])["equal"]
