"""Two processes write into one folder at the same time: one saves a whole checkpoint, and the other is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.checkpoint.lock import hold
from meshpar.checkpoint.saved import find_all
from meshpar.errors import CheckpointError

WRITER = """
import errno, fcntl, os, random, sys, time, warnings
from pathlib import Path
from meshpar.checkpoint.checkpoints import checkpoints
from meshpar.errors import CheckpointError
from tests.process.test_two_writers import state

def no_locks(*args):
    raise OSError(errno.ENOLCK, "No locks available")

warnings.simplefilter("ignore")
if sys.argv[2] == "without locks":
    fcntl.flock = no_locks
print("ready", flush=True)
for folder in sys.stdin:
    time.sleep(random.random() / 50)
    try:
        with checkpoints(Path(folder.strip())) as saved:
            saved.save(1, state(int(sys.argv[1])))
        print("saved", flush=True)
    except CheckpointError as error:
        print(error, flush=True)
"""
HOLDER = """
import sys
from pathlib import Path
from meshpar.checkpoint.lock import hold

with hold(Path(sys.argv[1])):
    print("ready", flush=True)
    sys.stdin.read()
"""


def state(writer: int) -> dict[str, jax.Array]:
    return {f"w{i}": jnp.full((64, 64), float(writer)) for i in range(8)}


@contextmanager
def started(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process that has printed that it is ready."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        yield process
    finally:
        process.kill()
        process.communicate()


def race(folder: Path, how: str, trials: int) -> list[tuple[list[str], set[float]]]:
    """For each trial, what the two writers print and the numbers in the resulting checkpoint."""
    found: list[tuple[list[str], set[float]]] = []
    with ExitStack() as stack:
        writers: list[Any] = [stack.enter_context(started(WRITER, i, how)) for i in range(2)]
        for trial in range(trials):
            for writer in writers:
                print(folder / str(trial), file=writer.stdin, flush=True)
            printed = [writer.stdout.readline().strip() for writer in writers]
            (saved,) = find_all(folder / str(trial))
            restored = saved.restore(jax.eval_shape(lambda: state(0)))
            found.append((printed, set(np.unique([np.asarray(x) for x in restored.values()]).tolist())))
    return found


@pytest.mark.parametrize("trials", [10, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["with locks", "without locks"])
def test_of_two_writers_of_a_step_one_saves_it_whole_and_the_other_is_refused(how: str, trials: int, tmp_path: Path):
    for printed, numbers in race(tmp_path, how, trials):
        assert printed.count("saved") == 1, printed
        (refusal,) = (line for line in printed if line != "saved")
        assert "is in use by" in refusal or "exists, and a checkpoint is never overwritten" in refusal
        assert numbers == {float(printed.index("saved"))}


def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path: Path):
    run_dir = tmp_path / "runs" / "first"
    with started(HOLDER, run_dir) as first:
        owner = json.loads((run_dir / ".lock").read_text())
        with pytest.raises(CheckpointError) as error, hold(run_dir):
            pass
        assert str(error.value) == (
            f"run_dir: {run_dir} is in use by process {first.pid} on {os.uname().nodename}, since {owner['started']}; "
            "set another run_dir, or stop that process"
        )
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert (run_dir / ".lock").exists()
        with hold(run_dir):
            assert json.loads((run_dir / ".lock").read_text())["pid"] == os.getpid()
    assert not [*run_dir.iterdir()]


def test_control_without_a_lock_both_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fcntl.flock", lambda file, how: None)
    with hold(tmp_path), hold(tmp_path):
        pass


def test_a_file_system_without_locks_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def flock(file: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.warns(UserWarning, match="without locks"), hold(tmp_path) as locked:
        assert not locked
