"""Processes of a run read disjoint rows in workers, and a run goes on with another number of processes, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.test_launch import ends, launch, losses, meshpar

pytestmark = [pytest.mark.matrix, pytest.mark.slow]

ROWS = """
import os
from pathlib import Path
import flax.linen as nn
import numpy as np

class Rows:
    def __init__(self, num, seed):
        draw = np.random.default_rng(seed)
        self.x = draw.normal(size=(num, 4)).astype("f")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        with Path("read", os.environ["READ_BY"] + "-" + str(os.getpid())).open("a") as file:
            file.write(f"{index}\\n")
        return {"x": self.x[index], "y": self.x[index].sum(keepdims=True)}

def rows(num=64, seed=0):
    return Rows(num, seed)

def noisy(row, rng):
    return {**row, "x": row["x"] + rng.normal(size=4).astype("f")}

class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x)
"""
CONFIG = """
model: {kind: import, target: "own_rows:Model"}
data:
  {kind: import, target: "own_rows:rows", held_out: {num: 8, seed: 1}, transform: "own_rows:noisy", batch_size: 8,
   workers: 1}
loss: {kind: regress, label: y}
optim: {kind: adamw, lr: 1e-2}
mesh: {data: 2}
rules: {batch: [data], unnamed: []}
log_every: 1
num_steps: 20
loggers: []
"""
EPOCH = 8
"""Steps."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_rows.py").write_text(ROWS)
    Path("config.yaml").write_text(CONFIG)
    Path("read").mkdir()


def train(processes: int, run_dir: str, steps: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("READ_BY", name)
    words = ["train", "config.yaml", f"run_dir={run_dir}", f"num_steps={steps}"]
    ends(meshpar(*words, "--devices=2") if processes == 1 else launch(processes, *words))


def read_by(name: str, num: int) -> list[list[int]]:
    """The first rows that each worker of a run read. The processes of the run read the first row, and held-out ones."""
    logs = [list(map(int, path.read_text().split())) for path in Path("read").glob(f"{name}-*")]
    return [log[:num] for log in logs if len(log) > EPOCH * 4]


def test_rows_are_disjoint_and_a_run_goes_on_with_other_processes(here, monkeypatch: pytest.MonkeyPatch):
    train(1, "whole", 20, "whole", monkeypatch)
    expected = losses(Path("whole"))
    (epoch,) = read_by("whole", EPOCH * 8)
    assert sorted(epoch) == list(range(64))

    train(2, "two", 12, "two", monkeypatch)
    first, second = read_by("two", EPOCH * 4)
    assert not {*first} & {*second} and sorted(first + second) == list(range(64))
    train(1, "two", 20, "two-one", monkeypatch)
    train(1, "one", 12, "one", monkeypatch)
    train(2, "one", 20, "one-two", monkeypatch)
    for run in ("two", "one"):
        assert losses(Path(run)) == expected
    assert len(set(expected.values())) == 20
    # The control: rows in another order are seen in the losses.
    monkeypatch.setenv("READ_BY", "seed")
    ends(meshpar("train", "config.yaml", "run_dir=seed", "num_steps=2", "seed=1", "--devices=2"))
    assert losses(Path("seed"))[2] != expected[2]
