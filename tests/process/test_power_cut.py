"""The power is cut at random moments while checkpoints are written: every announced checkpoint survives."""

from __future__ import annotations

import random
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.checkpoint.saved import find, find_all
from meshpar.errors import CheckpointError
from tests.process.power_cut import copy_image, make_image, mounted, stopped, why_not

WRITER = """
import os, random, sys, time
from pathlib import Path
from meshpar.checkpoint.checkpoints import checkpoints
from tests.process.test_power_cut import state

if sys.argv[2] == "without sync":
    os.fsync = lambda file: None
with checkpoints(Path(sys.argv[1]) / "run" / "checkpoints") as saved:
    for step in range(1, 10**6):
        saved.save(step, state(step))
        saved.wait()
        print(step, flush=True)
        time.sleep(random.random() / 20)
"""


def state(step: int) -> dict[str, jax.Array]:
    return {"step": jnp.int32(step), "w": jnp.sin(step + jnp.arange(2.0**14)), "b": jnp.full(8, float(step))}


@contextmanager
def writing(folder: Path, how: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that saves one checkpoint after the other, and writes the step of each saved one to `log`."""
    command = [sys.executable, "-c", WRITER, str(folder), how]
    with log.open("w") as file:
        writer = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        while not log.read_text():
            assert writer.poll() is None, "the writer ended before it had saved a checkpoint"
            time.sleep(0.05)
        yield writer
    finally:
        writer.kill()
        writer.wait()


def is_whole(folder: Path, announced: int) -> bool:
    """Whether the newest checkpoint is the announced one, or a later one, and is restored to the byte."""
    structs = jax.eval_shape(lambda: state(0))
    try:
        newest = find(folder)
        restored = newest.restore(structs)
        for saved in find_all(folder):
            saved.verify()
    except CheckpointError:
        return False
    expected = state(newest.step)
    return newest.step >= announced and all(np.array_equal(restored[path], expected[path]) for path in expected)


def cut_power(folder: Path, how: str, times: int) -> list[bool]:
    """For each cut, whether the last checkpoint announced before it is restored after it."""
    if reason := why_not(folder):
        pytest.skip(reason)
    seed = random.randrange(10**6)
    print(f"seed {seed}")  # a failing test shows it
    moments = random.Random(seed)
    image = folder / "disk.img"
    copy = folder / "copy.img"
    make_image(image)
    log = folder / "announced"
    found: list[bool] = []
    announced = 0
    with mounted(image, folder / "disk") as disk, writing(disk, how, log) as writer:
        for _ in range(times):
            time.sleep(moments.uniform(0.05, 0.5))
            with stopped(writer):
                assert writer.poll() is None, log.read_text()
                announced = int(log.read_text().split()[-1])
                copy_image(image, copy)
            with mounted(copy, folder / "after") as after:
                found.append(is_whole(after / "run", announced))
    print(announced, "checkpoints")
    return found


@pytest.mark.parametrize("times", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_an_announced_checkpoint_survives_a_power_cut(times: int, tmp_path: Path):
    assert cut_power(tmp_path, "with sync", times) == [True] * times


@pytest.mark.parametrize("times", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_control_without_sync_a_power_cut_loses_checkpoints(times: int, tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damaged checkpoints
        assert cut_power(tmp_path, "without sync", times) == [False] * times
