"""A stopped run resumes on any layout: with bitwise the same batches, and the losses of a run that was not stopped."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.checkpoint.retention import Retention
from meshpar.checkpoint.saved import Checkpoint
from meshpar.data import Synthetic
from meshpar.data.dataset import Dataset
from meshpar.experiment import prepare as prepared
from meshpar.experiment.actions import fit
from meshpar.experiment.config import Precision, Run
from meshpar.experiment.prepare import Prepared
from meshpar.mesh.layout import MeshLayout
from meshpar.models import GPT, Llama
from meshpar.nn.experts import Balance, Experts
from meshpar.optim import AdamW
from meshpar.optim.pruning import Magnitude, NOfM, Prune
from meshpar.sharding.rules import AxisRules
from meshpar.tree import flatten_with_paths, map_with_path
from tests.layouts import LAYOUTS

SHARED_ROWS = {
    "context4": ({"data": 2, "context": 4}, ["context"]),
    "context2": ({"data": 4, "context": 2}, ["context"]),
}
OVER_EXPERTS = {
    "expert4": ({"data": 2, "expert": 4}, ["experts"]),
    "expert2": ({"fsdp": 4, "expert": 2}, ["fsdp", "experts"]),
}
COMPILED: dict[Any, Any] = {}
NUM_STEPS = 6
# It has dropout, so that a wrong random key changes the loss.
MODEL = GPT(
    num_layers=1,
    hidden_size=16,
    num_heads=4,
    intermediate_size=32,
    vocab_size=29,
    pad_vocab_to_multiple=8,
    max_seq_len=16,
    dropout=0.2,
)
# Its balance loss uses the load of the step before, which a checkpoint contains.
WITH_EXPERTS = Llama(
    num_layers=1,
    hidden_size=16,
    num_heads=4,
    intermediate_size=32,
    vocab_size=29,
    experts=Experts(num=4, per_token=2, intermediate_size=8, balance=Balance(load="last_step")),
)


# Weights are pruned after steps 3 and 5.
SCHEDULE = {"paths": ("blocks.mlp.*.kernel",), "begin": 1, "every": 2, "times": 2}
PRUNE: dict[str, Prune] = {"magnitude": Magnitude(sparsity=0.6, **SCHEDULE), "n_of_m": NOfM(**SCHEDULE)}


class Where(NamedTuple):
    layout: str
    lowering: str
    num_microbatches: int
    matmul: str = ""
    prune: str = ""

    def __str__(self) -> str:
        return "-".join(str(x) for x in self if x)


@dataclass
class Recording:
    """The batches and losses of a run, from its first step on, and its last state."""

    batches: list[dict[str, np.ndarray]]
    losses: np.ndarray
    state: Any

    def equals(self, other: Recording) -> None:
        assert len(self.batches) == len(other.batches) and len(self.losses) == len(other.losses)
        for found, expected in zip(self.batches, other.batches, strict=True):
            jax.tree.map(np.testing.assert_array_equal, found, expected)
        np.testing.assert_allclose(self.losses, other.losses, rtol=0, atol=1e-10)


def run_at(where: Where, run_dir: Path) -> Recording:
    """Trains to the end, from the last checkpoint in `run_dir` if there is one."""
    sizes, presets = (LAYOUTS | SHARED_ROWS | OVER_EXPERTS)[where.layout]
    run = Run(
        model=WITH_EXPERTS if where.layout in OVER_EXPERTS else MODEL,
        data=Synthetic(batch_size=32, seq_len=16, vocab_size=29, num_documents=40, document_len=100),
        optim=AdamW(lr=1e-2),
        mesh=MeshLayout(**sizes),
        rules=AxisRules(preset=tuple(presets)),
        lowering=where.lowering,
        precision=Precision(params="float64", compute="float64", matmul=where.matmul or None),
        prune=PRUNE.get(where.prune),
        num_steps=NUM_STEPS,
        num_microbatches=where.num_microbatches,
        log_every=1,
        checkpoints=Retention(every=1, keep=NUM_STEPS),
        run_dir=run_dir,
    )
    read: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dataset, "batches", _noted(Dataset.batches, read))
        for name in ("compile_step", "lazy_evaluation"):
            patch.setattr(Prepared, name, _once(getattr(Prepared, name), where))
        begun = len(_records(run_dir))
        state = fit(run, json=True)
    losses = [record["loss"] for record in _records(run_dir)[begun:] if record["kind"] == "train"]
    return Recording(read[: len(losses)], np.array(losses), state)


def _once(compile_: Any, where: Where) -> Any:
    """Compiles once for each place, and again for another random key."""

    def once(self: Prepared) -> Any:
        key = where, compile_, prepared.step_key
        if key not in COMPILED:
            COMPILED[key] = compile_(self)
        return COMPILED[key]

    return once


def _noted(batches: Any, read: list[Any]) -> Any:
    def noted(self: Dataset, start: int = 0, rows: Any = None) -> Any:
        for batch in batches(self, start, rows):
            if self.seed is not None:  # training data, not held-out data
                read.append(batch)
            yield batch

    return noted


def _records(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@lru_cache
def unbroken(where: Where, folder: Path) -> tuple[Path, Recording]:
    run_dir = folder / str(where)
    return run_dir, run_at(where, run_dir)


def resumed(before: Where, after: Where, stopped: int, folder: Path, tmp_path: Path) -> tuple[Recording, Recording]:
    """Recordings from step `stopped` on: of a run that was not stopped, and of one that resumed there."""
    whole, recording = unbroken(before, folder)
    shutil.copytree(whole / "checkpoints" / str(stopped), tmp_path / "checkpoints" / str(stopped))
    rest = replace(recording, batches=recording.batches[stopped:], losses=recording.losses[stopped:])
    return rest, run_at(after, tmp_path)


PRUNED = Where("zero3", "manual", 1, prune="magnitude")
PLACES = [Where(*place) for place in product(LAYOUTS, ["manual", "auto"], [1, 4])]
SAMPLE = [
    (PRUNED, Where("data2_fsdp2_tensor2", "auto", 4, prune="magnitude")),
    (Where("expert4", "manual", 1), Where("expert2", "manual", 1)),
]
# Each place is saved from once and resumed on once. After them, rows are sharded over 4, 2 and no devices, and layers
# multiply in 8 bits, whose scales are not in a checkpoint.
SWEEP = [
    *zip(PLACES, random.Random(0).sample(PLACES, len(PLACES)), strict=True),
    (Where("context4", "manual", 1), Where("context2", "manual", 1)),
    (Where("context2", "manual", 1), Where("data8", "manual", 1)),
    (Where("data8", "manual", 1, "int8"), Where("data2_fsdp2_tensor2", "manual", 1, "int8")),
]
CASES = [
    *(pytest.param(*pair, id=" to ".join(map(str, pair))) for pair in SAMPLE),
    *(pytest.param(*pair, id=" to ".join(map(str, pair)), marks=pytest.mark.slow) for pair in SWEEP),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("unbroken")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("before", "after"), CASES)
def test_a_resumed_run_continues_as_if_it_had_not_stopped(before: Where, after: Where, folder: Path, tmp_path: Path):
    stopped = random.Random(f"{before} {after}").randrange(1, NUM_STEPS)
    expected, got = resumed(before, after, stopped, folder, tmp_path)
    got.equals(expected)


PRUNED_ELSEWHERE = [
    PRUNED._replace(layout="zero1"),
    Where("data2_fsdp2_tensor2", "manual", 4, prune="n_of_m"),
    Where("data2_fsdp2_tensor2", "auto", 1, prune="magnitude"),
]


@pytest.mark.parametrize("place", [PRUNED, *(pytest.param(one, marks=pytest.mark.slow) for one in PRUNED_ELSEWHERE)])
def test_a_resumed_run_prunes_the_same_weights_to_the_bit(place: Where, folder: Path, tmp_path: Path):
    """It stops between two prunings."""
    expected, got = resumed(place, place, 3, folder, tmp_path)
    assert (got.losses == expected.losses).all()
    arrays = flatten_with_paths(got.state)
    want = flatten_with_paths(expected.state)
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((arrays, want)))
    weights = flatten_with_paths(got.state.params)
    masks = {path.partition(".masks.")[2]: mask for path, mask in arrays.items() if ".masks." in path}
    assert {*masks} == {"blocks.mlp.up.kernel", "blocks.mlp.down.kernel"}
    for path, mask in masks.items():
        assert (np.asarray(weights[path] == 0) == ~np.asarray(mask)).all() and not mask.all()
        if place.layout != "zero1":  # which holds whole weights
            assert mask.sharding == weights[path].sharding
        assert not mask.sharding.is_fully_replicated


# Planted faults ----------------------------------------------------------------------------------------------------


def off_by_one(patch: pytest.MonkeyPatch) -> None:
    batches = Dataset.batches
    patch.setattr(Dataset, "batches", lambda self, start=0, rows=None: batches(self, start + (start > 0), rows))


def without_optimizer_state(patch: pytest.MonkeyPatch) -> None:
    restore = Checkpoint.restore

    def forgetful(self: Checkpoint, *args: Any) -> Any:
        return map_with_path(
            lambda path, x: jnp.zeros_like(x) if path.startswith("opt_state.") else x, restore(self, *args)
        )

    patch.setattr(Checkpoint, "restore", forgetful)


def another_key(patch: pytest.MonkeyPatch) -> None:
    """Random keys count from the step at which the process began."""
    patch.setattr(
        "meshpar.experiment.prepare.step_key", lambda seed, step: jax.random.fold_in(jax.random.key(seed), step - 2)
    )


def experts_of_a_neighbour(patch: pytest.MonkeyPatch) -> None:
    restore = Checkpoint.restore

    def shifted(self: Checkpoint, *args: Any) -> Any:
        return map_with_path(
            lambda path, x: jnp.roll(x, 1, axis=1) if path.startswith("params.blocks.mlp.experts.gate") else x,
            restore(self, *args),
        )

    patch.setattr(Checkpoint, "restore", shifted)


def without_masks(patch: pytest.MonkeyPatch) -> None:
    restore = Checkpoint.restore

    def unmasked(self: Checkpoint, *args: Any) -> Any:
        return map_with_path(lambda path, x: jnp.ones_like(x) if ".masks." in path else x, restore(self, *args))

    patch.setattr(Checkpoint, "restore", unmasked)


DATA8 = Where("data8", "manual", 1)
FAULTS = {
    off_by_one: (DATA8, DATA8, 2),
    without_optimizer_state: (DATA8, DATA8, 2),
    another_key: (DATA8, DATA8, 2),
    experts_of_a_neighbour: (Where("expert4", "manual", 1), Where("expert2", "manual", 1), 2),
    without_masks: (PRUNED, PRUNED, 3),
}
"""Fault -> where the run is saved and resumed, and after which step."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_in_resuming_are_seen(fault: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before, after, stopped = FAULTS[fault]
    unbroken(before, folder)
    fault(monkeypatch)
    expected, got = resumed(before, after, stopped, folder, tmp_path)
    assert np.abs(got.losses - expected.losses).max() > 1e-5
    with pytest.raises(AssertionError):
        got.equals(expected)
