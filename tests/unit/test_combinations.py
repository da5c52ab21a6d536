"""`prepare` refuses exactly the pairs of features that the table says cannot be combined."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from meshpar import ConfigError, Run, prepare
from meshpar.experiment.validate import OF_MODEL, features
from meshpar.parallel import combinations as table
from meshpar.parallel.combinations import REFUSED

MODEL = {
    "kind": "llama", "num_layers": 2, "hidden_size": 16, "num_heads": 4, "intermediate_size": 32, "vocab_size": 258,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "loss": {"loss": {"z_loss": 1e-4}},
    "freeze": {"freeze": ["embedding"]},
    "lora": {"lora": {"rank": 2}},
    "prune": {"prune": {"kind": "n_of_m", "every": 1, "times": 2}},
    "model.remat.offload": {"model": {"remat": {"offload": ["attn"]}}},
    "parallel.pipeline": {"parallel": {"pipeline": {"kind": "1f1b", "num_microbatches": 2}}},
    "parallel.local": {"parallel": {"local": {"every": 2}}},
    "parallel.gradient_reduction": {"parallel": {"gradient_reduction": {}}},
    "parallel.tensor.overlap": {"parallel": {"tensor": {"overlap": "ring"}}},
    "parallel.fsdp.overlap": {"parallel": {"fsdp": {"overlap": "ring"}}},
    "precision.matmul": {"precision": {"matmul": "fp8"}},
}
# A distillation reads its teacher's checkpoint. Both overlaps exclude each other under any rules: test_overlap_errors.
PAIRS = [pair for pair in combinations(SETTINGS, 2) if not all("overlap" in key for key in pair)]


def run_with(*keys: str) -> Run:
    settings: dict[str, Any] = {}
    for key in keys:
        for section, value in SETTINGS[key].items():
            settings[section] = settings.get(section, {}) | value if isinstance(value, dict) else value
    is_piped = "parallel.pipeline" in keys
    slices = {"replica": 2} if "parallel.local" in keys else {}
    return Run(
        model=MODEL | settings.pop("model", {}),
        data={"kind": "synthetic", "batch_size": 8, "seq_len": 8},
        optim={"kind": "adamw", "lr": 1e-3},
        mesh={"fsdp": 2, "tensor": 2} | ({"pipe": 2} if is_piped else {}) | slices,
        rules=["fsdp", "megatron_sp", *(["pipeline"] if is_piped else [])],
        num_steps=2,
        run_dir="unused",
        **settings,
    )


def refused(*keys: str) -> bool:
    run = run_with(*keys)
    try:
        prepare(run, run.mesh.abstract())
    except ConfigError as error:
        return any(f"\n  {key}\n" in str(error) for key in keys)
    return False


def test_each_feature_is_in_the_table_and_recognized():
    assert {*OF_MODEL} < {*SETTINGS, "distill"} and {*sum(REFUSED, ())} < {*SETTINGS}
    for key in SETTINGS:
        run = run_with(key)
        assert features(run, run.context(run.mesh.abstract())) == [key]
        assert not refused(key)


def test_only_pairs_that_cannot_work_are_refused():
    """A further pair needs a reason that excludes it, and a line here: that nobody has tried it is no reason."""
    overlaps = ("parallel.tensor.overlap", "parallel.fsdp.overlap")
    excluded = {(overlap, other) for overlap in overlaps for other in ("parallel.pipeline", "precision.matmul")}
    alone = {("prune", "lora"), ("prune", "parallel.local")}
    assert {*REFUSED} == excluded | {("model.remat.offload", "parallel.pipeline")} | alone


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_pair_is_refused_if_the_table_says_so(first, second):
    assert refused(first, second) == ((first, second) in REFUSED or (second, first) in REFUSED)


def test_control_without_the_table_pairs_pass(monkeypatch):
    monkeypatch.setattr(table, "REFUSED", {})
    assert not refused("parallel.tensor.overlap", "parallel.pipeline")
