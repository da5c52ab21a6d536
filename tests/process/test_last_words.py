"""What a user reads when processes end: their own last words, why they ended, and the way to go on."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshpar.chaos import trial
from meshpar.launch import pace, relay, workers
from meshpar.launch.elastic import Membership
from meshpar.launch.supervise import supervise
from meshpar.launch.workers import Ended
from meshpar.mesh import join
from meshpar.train.loop.signals import Interrupted
from tests.process.test_launch import LAUNCHER, config, ends, launch, meshpar, wait_for_step, worker_of  # noqa: F401
from tests.waiting import LIMIT_S, wait_for

# Gloo writes a line in pieces, those of two threads in turn; absl writes a line at once.
NOISE = """
import os, sys, time
for piece in ("[Gloo] Rank ", "0", " is connected to ", "1 peer ranks.", "\\n", *["[Gloo] Rank ", "0"] * 2, ".\\n"):
    os.write(2, piece.encode()); time.sleep(0.01)
os.write(2, b"W1125 14:34:58.410511   28501 a/client.cc:1622] something\\nE1125 14:34:58.4 28501 a.cc:1] broken\\n")
print("50 % [", end="", flush=True); time.sleep(0.02); print("Gl] done", flush=True)
"""


def test_what_libraries_say_about_themselves_is_in_the_log_alone(tmp_path):
    words = [sys.executable, "-c", LAUNCHER, NOISE, str(tmp_path)]
    printed = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout
    assert printed == "E1125 14:34:58.4 28501 a.cc:1] broken\n50 % [Gl] done\n"
    assert "[Gloo] Rank 0 is connected to 1 peer ranks.\n" in (tmp_path / "process-0.log").read_text()


@pytest.mark.parametrize("seed", range(20))
def test_output_in_any_pieces_arrives_whole(seed):
    rng = random.Random(seed)
    text = b"".join(
        rng.choice(
            [
                b"[Gloo] Rank 1 is x\n",
                b"[Gloo] Rank 1[Gloo] Rank 1 is x\n",
                b"[",
                b"[G",
                b"loss 3\r",
                b"\x1b[2K",
                b"a\n",
            ]
        )
        for _ in range(30)
    )
    held = shown = b""
    at = 0
    while at < len(text):
        size = rng.randrange(1, 9)
        out, held = relay._without_begun_noise(relay.without_noise(held + text[at : at + size]))
        shown += out
        at += size
    assert shown + held == re.sub(rb"(\[Gloo\] Rank 1)+ is x\n", b"", text)


def test_the_quoted_lines_are_the_processes_own(tmp_path):
    fails = f"import os, sys, time\nif os.environ['{join.PROCESS}'] == '1':\n"
    fails += (
        "    print('no more paper', flush=True)\n    os.write(2, b'[Gloo] Rank 0 is connected\\n' * 30); sys.exit(3)"
    )
    ended = workers.Group([sys.executable, "-c", fails + "\ntime.sleep(9)"], 2, tmp_path, is_quiet=True).run()
    assert ended.why.splitlines()[-1] == "  | no more paper"
    silent = (
        f"import os, sys, time\nif os.environ['{join.PROCESS}'] == '1':\n    os.kill(os.getpid(), 9)\ntime.sleep(9)"
    )
    ended = workers.Group([sys.executable, "-c", silent], 2, tmp_path, is_quiet=True).run()
    assert ended.why.splitlines()[-1] == f"it printed nothing to {tmp_path / 'process-1.log'}"


@pytest.mark.parametrize(
    ("newest", "told"),
    [
        (None, "there is no checkpoint: the same command begins again"),
        (7, "the same command resumes from checkpoint 7"),
    ],
)
def test_a_failure_names_the_way_to_go_on(newest, told):
    ended = supervise(lambda size: Ended(137, "process 1 ended first"), 0, lambda: newest, Membership(2))
    assert ended.why == f"process 1 ended first\n{told}"
    assert supervise(lambda size: Ended(2, "bad input"), 0, lambda: newest, Membership(2)).why == "bad input"


def test_a_killed_process_of_a_run_says_how_to_resume(config):  # noqa: F811
    running = launch(2, "train", config, "run_dir=run", "num_steps=100000", "checkpoints=5")
    wait_for_step(12, "run", running)
    os.kill(worker_of(running.pid, 1), signal.SIGKILL)
    printed = ends(running, code=137)
    assert "process 1 ended first, with exit code 137" in printed
    assert "\nthe same command resumes from checkpoint " in printed
    assert "[Gloo]" not in printed


TWICE = """
import sys
from pathlib import Path
from meshpar.launch.elastic import Membership
from meshpar.launch.supervise import supervise
from meshpar.launch.workers import Group
group = Group([sys.executable, "-c", sys.argv[1]], 2, Path(sys.argv[2]), is_quiet=True)
ended = supervise(lambda size: group.run(), 5, lambda: 7, Membership(2))
print(ended.code, ended.why)
"""
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(600)"
)


def test_a_second_signal_is_no_crash_and_no_reason_to_start_again(tmp_path):
    words = [sys.executable, "-c", TWICE, STUBBORN, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        logs = [tmp_path / f"process-{index}.log" for index in range(2)]
        wait_for(lambda: all(log.exists() and "here" in log.read_text() for log in logs), running)
        for _ in range(2):
            running.send_signal(signal.SIGTERM)
            time.sleep(0.5)
        printed, said = running.communicate(timeout=LIMIT_S)
    assert printed == (
        "137 a second signal came before the processes had ended, and killed them: the steps since the last checkpoint "
        "are lost\nthe same command resumes from checkpoint 7\n"
    )
    assert said == ""


# Hangs --------------------------------------------------------------------------------------------------------------

HANGS = """
import time
from pathlib import Path
from meshpar.mesh.cursor import of_process

cursor = of_process(Path())
for step in range(1, 16):
    cursor.at(step, "trains")
    time.sleep(0.15)
time.sleep(600)
"""


def test_a_hang_is_noticed_after_ten_steps_time(tmp_path, monkeypatch):
    monkeypatch.setattr(pace, "LEAST_S", 0.5)
    began = time.monotonic()
    ended = workers.Group([sys.executable, "-c", HANGS], 2, tmp_path, is_quiet=True).run()
    assert ended.code == workers.HUNG
    assert time.monotonic() - began < 60, "long before the 300 s that hold where no step is known"


def test_the_limit_is_learnt_from_steps_alone():
    found = pace.Pace()
    assert found.limit_s == pace.UNKNOWN_S
    at = pace.Position
    for step in range(20):
        found.look([at(step, "trains", 0.1), at(step + 1, "trains", 0.1)], now=5.0 * step)
    assert found.limit_s == 50.0
    found.look([at(20, "evaluates", 0.1), at(20, "trains", 0.1)], now=1000.0)
    found.look([at(21, "trains", 0.1), at(21, "trains", 0.1)], now=2000.0)
    assert max(found.steps_s) == 5.0, "an evaluation is no step"
    quick = pace.Pace()
    for step in range(20):
        quick.look([at(step, "trains", 0.1)], now=0.01 * step)
    assert quick.limit_s == pace.LEAST_S
    assert pace.Pace(given_s=7.0).limit_s == 7.0


# Chaos --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_ends_chaos(config, number):  # noqa: F811
    running = meshpar("chaos", config, "run_dir=run", "num_steps=100000", "--faults=slow")
    wait_for_step(3, "run/undisturbed", running)
    running.send_signal(number)
    printed = ends(running, code=join.INTERRUPTED)
    assert "stopped by a signal: nothing was compared" in printed
    assert not Path("run/seed-0").exists()


def test_one_signal_ends_chaos_under_faults(tmp_path, monkeypatch):
    """A signal to a process of the run is a fault, after which it starts again; one to chaos itself ends it."""
    came = iter([Ended(join.INTERRUPTED), Ended(join.INTERRUPTED, signals=1)])

    class Attempts:
        members = Membership(2)

        def __init__(self, *given: object):
            pass

        def __call__(self, size: int) -> Ended:
            return next(came)

    monkeypatch.setattr(trial, "Attempts", Attempts)
    setup = trial.Setup(None, [], 2, 4, tmp_path)  # pyright: ignore
    with pytest.raises(Interrupted, match="nothing was compared"):
        trial.disturbed(setup, [], 0)
    assert next(came, None) is None
