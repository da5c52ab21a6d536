"""A signal ends a run after its step with a checkpoint, from which it resumes to the same numbers. A second signal ends
it at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from meshpar.checkpoint.retention import Retention
from meshpar.errors import ConfigError
from meshpar.mesh.join import INTERRUPTED
from meshpar.train.loop.signals import Interrupted, Signals
from tests.unit.test_loop import InPlace, Numbers, recorded, run, saved_steps, steps_of, toy


@dataclass
class Signalled(Numbers):
    """A data set that sends this process a signal at batch `at`, and never yields that batch if it stalls."""

    at: int = 5
    number: signal.Signals = signal.SIGTERM
    stalls: bool = False

    def batches(self, start: int = 0, rows: Any = None) -> Iterator[dict[str, np.ndarray]]:
        for index in range(start, self.length):
            if index == self.at:
                os.kill(os.getpid(), self.number)
                if self.stalls:
                    threading.Event().wait(60)
                    raise AssertionError("nobody ended the wait")
            yield self.batch(index)


@dataclass(frozen=True)
class Signalling(InPlace):
    """A step that sends this process a signal while it runs, in step `last`."""

    last: int
    number: signal.Signals
    batch: Any
    order: None = None

    def __call__(self, state: Any, batch: Any) -> Any:
        state, metrics = toy().step(state, batch)
        if int(jax.device_get(state.step)) == self.last:
            os.kill(os.getpid(), self.number)
        return state, metrics


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A shell without job control starts what runs in the background with SIGINT ignored, which `Signals` respects."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(run_dir: Path, **changed: Any) -> str:
    signals = Signals()
    with pytest.raises(Interrupted) as ended, signals.listening():
        run(run_dir, signals=signals, **changed)
    return str(ended.value)


def assert_resumes_as_unbroken(tmp_path: Path, **changed: Any) -> None:
    unbroken = run(tmp_path / "unbroken", log_every=1, **changed)
    resumed = run(tmp_path / "run", log_every=1, **changed)
    np.testing.assert_array_equal(np.asarray(resumed.params["w"]), np.asarray(unbroken.params["w"]))
    for kind in ("train", "evaluation"):
        losses = [[(r["step"], r["loss"]) for r in recorded(tmp_path / name, kind)] for name in ("run", "unbroken")]
        assert losses[0] == losses[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signalled_step_is_finished_and_saved_and_the_run_resumes_to_the_same_numbers(tmp_path, number):
    message = interrupted(tmp_path / "run", log_every=1, step=Signalling(4, number, toy().step.batch))
    where = tmp_path / "run" / "checkpoints" / "4"
    assert message == f"stopped by {number.name} at step 4; checkpoint in {where}; the same command resumes from it"
    assert saved_steps(tmp_path / "run") == [4]
    assert_resumes_as_unbroken(tmp_path)


@pytest.mark.parametrize("stalls", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_batch_is_awaited_saves_the_step_before(tmp_path, number, stalls):
    message = interrupted(tmp_path / "run", log_every=1, train=Signalled(number=number, stalls=stalls))
    assert f"stopped by {number.name} at step 5;" in message
    assert saved_steps(tmp_path / "run") == [5]
    assert_resumes_as_unbroken(tmp_path)


def test_a_step_that_was_saved_already_is_not_saved_again(tmp_path):
    interrupted(tmp_path / "run", log_every=1, train=Signalled(at=6), kept=Retention(every=3))
    assert saved_steps(tmp_path / "run") == [3, 6]


@pytest.mark.parametrize("at", [4, 10])
def test_an_interrupted_evaluation_is_repeated_after_resuming(tmp_path, at):
    rule = {"eval_every": 4}
    held_out = Signalled(length=3, at=1)
    calls = []

    class AtSecond(Signalled):
        def batches(self, start: int = 0, rows: Any = None) -> Iterator[dict[str, np.ndarray]]:
            calls.append(start)
            data = held_out if len(calls) == {4: 1, 10: 3}[at] else Numbers(length=3)
            return data.batches(start, rows)

    message = interrupted(tmp_path / "run", log_every=1, held_out=AtSecond(), **rule)
    assert f"at step {at};" in message
    assert at not in steps_of(tmp_path / "run", "evaluation")
    assert_resumes_as_unbroken(tmp_path, **rule)


def test_before_the_first_step_there_is_nothing_to_save(tmp_path):
    signals = Signals()
    with pytest.raises(Interrupted) as ended, signals.listening():
        os.kill(os.getpid(), signal.SIGTERM)
    message = "stopped by SIGTERM before the first step: there was nothing to save; the same command starts it again"
    assert (str(ended.value), ended.value.exit_code) == (message, INTERRUPTED)


def test_a_run_whose_first_batch_never_comes_can_be_stopped(tmp_path):
    assert "before the first step" in interrupted(tmp_path, train=Signalled(at=0, stalls=True))
    assert saved_steps(tmp_path) == []


def test_earlier_handlers_of_signals_are_restored(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)], signal.set_wakeup_fd(-1)
    interrupted(tmp_path, train=Signalled())
    assert (
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        signal.set_wakeup_fd(-1),
    ) == before
    assert "signals" not in [thread.name for thread in threading.enumerate()]


def test_an_ignored_signal_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Signals().listening():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_control_without_listening_a_keyboard_interrupt_saves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt) as ended:
        run(tmp_path, train=Signalled(number=signal.SIGINT))
    assert type(ended.value) is KeyboardInterrupt
    assert saved_steps(tmp_path) == []


def test_listening_in_another_thread_is_refused():
    refused: list[str] = []

    def listen() -> None:
        try:
            with Signals().listening():
                pass
        except ConfigError as error:
            refused.append(str(error))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert refused == ["signals can be handled in the main thread only: call fit there, or without signals=True"]


# The main thread runs no Python while it hashes, as when XLA compiles.
BUSY = """
import hashlib, sys, time
from meshpar.train.loop.signals import Signals
signals = Signals()
with signals.listening():
    if sys.argv[1] == "stepping":
        signals.begin()
    print("ready", flush=True)
    if sys.argv[2] == "python":
        while True:
            time.sleep(0.01)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


def ended(phase: str, language: str, *pauses: float) -> tuple[int, str]:
    """Exit code and standard error of a process that gets a SIGTERM after each pause."""
    with subprocess.Popen(
        [sys.executable, "-c", BUSY, phase, language], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout and process.stdout.readline() == "ready\n"
            for pause in pauses:
                time.sleep(pause)
                process.send_signal(signal.SIGTERM)
            return process.wait(60), process.stderr.read() if process.stderr else ""
        finally:
            process.kill()


def test_a_signal_while_xla_compiles_ends_the_process_soon():
    message = "stopped by SIGTERM before the first step: there was nothing to save; the same command starts it again"
    assert ended("compiling", "C", 0.1) == (75, f"meshpar: {message}\n")


def test_a_second_signal_ends_the_process_at_once():
    assert ended("stepping", "python", 0.1, 0.5) == (-signal.SIGTERM, "")
    assert ended("stepping", "C", 0.1, 0.5) == (128 + signal.SIGTERM, "")
