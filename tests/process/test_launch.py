"""Processes of this machine train together as one process does, end together, and leave nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from meshpar.errors import MeshError
from meshpar.experiment.config import load
from meshpar.experiment.elastic import Attempts
from meshpar.launch import workers
from meshpar.launch.elastic import Elastic, Membership
from meshpar.launch.supervise import supervise
from meshpar.launch.workers import Ended
from meshpar.mesh import join
from tests.waiting import LIMIT_S, is_alive, wait_for

pytestmark = pytest.mark.matrix

CONFIG = """
model: {kind: llama, num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 32}
data: {kind: synthetic, batch_size: 8, seq_len: 8}
optim: {kind: adamw, lr: 1e-2}
mesh: {data: 2, fsdp: 2}
num_steps: 12
log_every: 1
loggers: []
"""


def losses(run_dir: Path) -> dict[int, float]:
    """step -> loss, the last one where a step was repeated."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}


def meshes(run_dir: Path) -> list[dict[str, int]]:
    """The mesh of each attempt that began."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["config"]["mesh"] for line in lines if line["kind"] == "run"]


def meshpar(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "meshpar", *words]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def launch(processes: int, *words: str, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    return meshpar("launch", f"--processes={processes}", *before, "--", *words)


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


def wait_for_step(step: int, run_dir: str, running: subprocess.Popen[str]) -> None:
    record = Path(run_dir, "metrics.jsonl")
    wait_for(lambda: record.exists() and f'"step": {step},' in record.read_text(), running)


def test_two_processes_train_as_one_and_a_signal_to_one_ends_both_with_a_checkpoint(config):
    ends(meshpar("train", config, "run_dir=one", "--devices=4"))
    running = launch(2, "train", config, "run_dir=two", "num_steps=100000")
    wait_for_step(3, "two", running)
    os.kill(worker_of(running.pid, 1), signal.SIGTERM)
    printed = ends(running, code=75)
    assert "stopped by" in printed
    at = int(printed.split(" at step ")[1].split(";")[0])
    assert Path(f"two/checkpoints/{at}").is_dir()
    expected = losses(Path("one"))
    found = losses(Path("two"))
    assert all(abs(found[step] - expected[step]) < 1e-6 for step in range(1, min(at, 12) + 1))


def test_processes_with_different_configs_are_refused_before_they_train(config, tmp_path, capfd):
    script = f"{sys.executable} -m meshpar train {config} run_dir=run seed=${join.PROCESS} --devices=4"
    ended = workers.Group(["bash", "-c", script], 2, tmp_path).run()
    assert ended.code == 2
    assert "config.seed\n    1 on process 1, 0 on process 0\n    start all processes" in capfd.readouterr().err
    assert not Path("run").exists()


EDITED = f"""
import os, sys
from meshpar.cli import main
from meshpar.train import token_loss

exact = token_loss.cross_entropy
if os.environ["{join.PROCESS}"] == "1":
    token_loss.cross_entropy = lambda *args: exact(*args) + 1
sys.argv[0] = "meshpar"
main()
"""


def test_processes_with_different_programs_are_refused_before_they_train(config, tmp_path, capfd):
    words = [sys.executable, "-c", EDITED, "train", config, "run_dir=run", "--devices=4"]
    ended = workers.Group(words, 2, tmp_path).run()
    assert ended.code == 2
    assert re.search(r"  program\n    [0-9a-f]{64} on process 1, [0-9a-f]{64} on process 0\n", capfd.readouterr().err)
    assert not losses(Path("run"))


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
    ended = workers.Group([sys.executable, "-c", WORKER], 3, tmp_path).run()
    first, *_, last = ended.why.splitlines()
    assert ended.code == 3
    assert first.startswith("process 1 ended first, with exit code 3; processes 0, 2 did not end within")
    assert last == "  | no more paper"


def test_the_first_process_prints_to_the_terminal_and_to_its_log(tmp_path):
    """The terminal shows the progress bar as it moves; the log has what it showed last."""
    worker = (
        "import os, sys; print(sys.stdout.isatty(), os.get_terminal_size(1).columns);"
        "print('10 %\\r\\x1b[2K20 %'); print('odd', file=sys.stderr)"
    )
    terminal, end = os.openpty()
    termios.tcsetwinsize(end, (24, 57))
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, f"import os\nif os.environ['{join.PROCESS}'] == '0': {worker}", str(tmp_path)],
        stdout=end,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.communicate(timeout=LIMIT_S)[1] == "odd\n"
    os.close(end)
    shown = os.read(terminal, 2**16).decode()
    os.close(terminal)
    assert shown.replace("\r", "") == "True 57\n10 %\x1b[2K20 %\n"
    assert sorted((tmp_path / "process-0.log").read_text().splitlines()[1:]) == ["20 %", "True 57", "odd"]


def test_lines_of_the_first_process_keep_their_order(tmp_path):
    worker = "import sys\nfor i in range(200): print(i, file=(sys.stdout, sys.stderr)[i % 2], flush=True)"
    words = [sys.executable, "-c", LAUNCHER, worker, str(tmp_path)]
    printed = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout
    assert printed.split() == [str(i) for i in range(200)]
    assert (tmp_path / "process-0.log").read_text().splitlines()[1:] == printed.split()


@pytest.mark.parametrize(("visible", "count"), [("0,1,2,3,4,5,6,7", 8), ("", 0), ("GPU-5ebe,GPU-6a1c", 2)])
def test_the_gpus_of_a_host_are_divided_among_its_processes(visible, count, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv(workers.LOCAL_DEVICES, raising=False)
    assert workers.count_gpus() == count
    script = f"echo ${{{workers.LOCAL_DEVICES}-unset}}"
    workers.Group(["bash", "-c", script], 2, tmp_path, is_quiet=True, num_gpus=count // 2).run()
    half = count // 2
    printed = [(tmp_path / f"process-{index}.log").read_text().splitlines()[-1] for index in range(2)]
    expected = [",".join(map(str, range(half))), ",".join(map(str, range(half, 2 * half)))]
    assert printed == (expected if count else ["unset", "unset"])


# Steps without a model: a process notes where it is, and ends after SIGTERM. Process 1 of the first attempt is killed.
STEPS = f"""
import os, signal, sys, time
from pathlib import Path
from meshpar.mesh.cursor import of_process

signal.signal(signal.SIGTERM, lambda *_: sys.exit({join.INTERRUPTED}))
cursor = of_process(Path())
process, num_processes = os.environ["{join.PROCESS}"], os.environ["{join.NUM_PROCESSES}"]
attempts = Path("attempts")
if process == "0":
    with attempts.open("a") as file:
        file.write(num_processes + " ".join(["", *sys.argv[1:]]) + "\\n")
while process == "1" and not attempts.read_text():
    time.sleep(0.01)
for step in range(1, 15 if num_processes == "1" else 5):
    cursor.at(step, "trains")
    time.sleep(0.1)
    if process == "1" and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""
ELASTIC = {"min_processes": 1, "mesh": {"data": 1, "fsdp": -1}}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("return_s", "attempts"),
    [
        (0.5, ["2", "1 mesh.data=1 mesh.fsdp=-1 --devices=2", "2"]),
        (60, ["2", "1 mesh.data=1 mesh.fsdp=-1 --devices=2"]),
    ],
)
def test_a_run_goes_on_with_the_processes_that_are_left_until_others_return(config, capfd, return_s, attempts):
    run = load(Path(config), ["run_dir=run"]).model_copy(update={"elastic": Elastic(**ELASTIC, return_s=return_s)})
    running = Attempts(run, workers.Group([sys.executable, "-c", STEPS], 2, Path()), num_devices=4)
    Path("attempts").touch()
    running.members.now = lambda: float(len(Path("attempts").read_text().splitlines()))  # a second is an attempt
    assert supervise(running, 1, lambda: 7, running.members).code == 0
    assert Path("attempts").read_text().splitlines() == attempts
    assert Path("cursors/1").exists() == (attempts[-1] == "2")
    printed = capfd.readouterr().err
    assert "starts again from checkpoint 7 with 1 of 2 processes; 0 more restarts are left" in printed
    assert ("processes returned; the run continues from checkpoint 7 with 2 of them" in printed) == (len(attempts) == 3)


@pytest.mark.parametrize(
    ("checkpoints", "restarts", "attempts", "told"),
    [
        (
            [None] * 9,
            9,
            3,
            "3 attempts in a row failed and none came beyond the beginning: the failure is not by chance",
        ),
        ([5] * 9, 9, 3, "3 attempts in a row failed and none came beyond checkpoint 5: the failure is not by chance"),
        (list(range(9)), 4, 5, "it fails\nthe same command resumes from checkpoint 5"),
    ],
)
def test_restarts_are_bounded_and_a_failure_that_is_not_by_chance_ends_the_run(checkpoints, restarts, attempts, told):
    newest = iter(checkpoints)
    sizes: list[int] = []

    def fail(size: int) -> Ended:
        sizes.append(size)
        return Ended(1, "it fails")

    ended = supervise(fail, restarts, lambda: next(newest), Membership(2))
    assert ended.code == 1
    assert ended.why.endswith(told)
    assert sizes == [2] * attempts


@pytest.mark.parametrize(
    ("elastic", "fits"),
    [
        ({"mesh": {"data": 1, "fsdp": -1}}, [True, True, False, True]),  # the batch has 8 rows
        ({"mesh": {"fsdp": -1}}, [True, True, False, True]),
        ({"mesh": {"data": -1, "fsdp": 4}}, [False, True, False, True]),
    ],
)
def test_the_layout_says_which_numbers_of_processes_fit(config, elastic, fits):
    run = load(Path(config), ["run_dir=run"]).model_copy(update={"elastic": Elastic(**elastic)})
    attempts = Attempts(run, workers.Group([], 4, Path()), num_devices=8)
    assert [attempts.fits(size) for size in range(1, 5)] == fits


@pytest.mark.slow
def test_losses_do_not_depend_on_the_number_of_processes_that_are_left(config):
    words = ["train", config, "num_steps=400", "checkpoints=100", "optim.lr=1e-4"]
    elastic = "elastic={min_processes: 1, mesh: {data: 1, fsdp: -1}, return_s: 1}"
    running = launch(2, *words, "run_dir=run", elastic, before=["--restarts=2"])
    wait_for(lambda: Path("run/checkpoints/100").is_dir(), running)
    os.kill(worker_of(running.pid, 1), signal.SIGKILL)
    ends(running)
    assert [(sizes["data"], sizes["fsdp"]) for sizes in meshes(Path("run"))] == [(2, 2), (1, -1), (2, 2)]
    found = losses(Path("run"))
    ends(meshpar(*words, "run_dir=one", "--devices=4"))
    expected = losses(Path("one"))
    assert found.keys() == expected.keys()
    assert all(abs(found[step] - expected[step]) < 1e-6 for step in expected)


@pytest.mark.slow
def test_a_process_that_is_stopped_is_named(config):
    running = launch(2, "train", config, "run_dir=run", "num_steps=100000", before=["--hang-after=3"])
    wait_for_step(3, "run", running)
    os.kill(worker_of(running.pid, 1), signal.SIGSTOP)
    printed = ends(running, code=workers.HUNG)
    assert re.search(
        r"no process makes progress:\n  process 1: step .*; it does not answer\n  process 0: step .* s\n", printed
    )
    assert "in device_get" in Path("run/logs/cursors/0.stacks").read_text()


ALONE = """
import time
from meshpar.mesh import join
join._obey_launcher()
print("waits", flush=True)
time.sleep(600)
"""
LAUNCHER = """
import sys
from pathlib import Path
from meshpar.launch.workers import Group
Group([sys.executable, "-c", sys.argv[1]], 2, Path(sys.argv[2])).run()
"""


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
        with pytest.raises(
            MeshError, match=r"cannot listen at .*: Address already in use; choose another with --port or"
        ):
            join.join()
