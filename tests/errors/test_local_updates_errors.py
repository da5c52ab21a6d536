"""What a user reads who asks for local updates that cannot work."""

from __future__ import annotations

from typing import Any

import pytest

from meshpar import ConfigError, Run, VerificationError, prepare, verify

EXPERTS = {"num": 2, "per_token": 1, "intermediate_size": 8, "balance": {"kind": "bias"}}
PIPELINE = {"mesh": {"replica": 2, "pipe": 2}, "rules": ["pipeline"]}
ONE_F_ONE_B = {"kind": "1f1b", "num_microbatches": 2}
STALE = {"kind": "pipedream_2bw", "num_microbatches": 2}


def run_with(local: dict[str, Any], **changes: Any) -> Run:
    model = {"kind": "llama", "num_layers": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32}
    settings: dict[str, Any] = {
        "optim": {"kind": "adamw", "lr": 1e-3},
        "mesh": {"replica": 2, "data": 2, "fsdp": 2},
        "rules": ["fsdp"],
        "num_steps": 8,
    }
    parallel = {"local": {"every": 4} | local} | changes.pop("parallel", {})
    model |= changes.pop("model", {})
    data = {"kind": "synthetic", "batch_size": 16, "seq_len": 8}
    return Run(model=model, data=data, parallel=parallel, run_dir="unused", **settings | changes)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "no slices": (
        {"axis": "replica"},
        {"mesh": {"data": 2}, "rules": ["replicated"]},
        ("parallel.local.axis", "the mesh has one slice along replica", "parallel.local.axis=data, or mesh.replica=2"),
    ),
    "no rows": (
        {"axis": "tensor"},
        {"mesh": {"data": 2, "tensor": 2}, "rules": ["megatron"]},
        ("parallel.local.axis", "no rows of the batch are sharded over tensor", "heads is sharded over tensor"),
    ),
    "shards of parameters": (
        {"axis": "fsdp"},
        {},
        ("parallel.local.axis", "embed is sharded over fsdp, and a slice that trains alone has all of it"),
    ),
    "GSPMD": ({}, {"lowering": "auto"}, ("parallel.local", "lowering=manual, or parallel.local=null")),
    "part of a round": (
        {"start": 1},
        {},
        ("num_steps", "7 steps after parallel.local.start = 1 cannot be divided into rounds of 4 steps", "num_steps=5"),
    ),
    "fragments between steps": (
        {"fragments": 3},
        {},
        ("parallel.local.fragments", "cannot end 4 / 3 steps apart", "parallel.local.fragments=2"),
    ),
    "fragments of stages": (
        {"fragments": 2},
        PIPELINE | {"parallel": {"pipeline": ONE_F_ONE_B}},
        ("fragments=1, or no",),
    ),
    "fragments of matrices": ({"fragments": 2, "compress": "powersgd"}, {}, ("parallel.local.compress",)),
    "an overlap of rounds": ({"overlap_steps": 4}, {"num_steps": 8}, ("parallel.local.overlap_steps=3 or less",)),
    "an overlap that never ends": (
        {"overlap_steps": 3},
        {},
        (
            "5 steps after parallel.local.start = 0 and before the last 3 cannot be divided into rounds of 4 steps",
            "num_steps=7",
        ),
    ),
    "an overlap of stages": (
        {"overlap_steps": 2},
        PIPELINE | {"parallel": {"pipeline": ONE_F_ONE_B}, "num_steps": 10},
        ("parallel.local.overlap_steps=0, or no preset pipeline",),
    ),
    "growing rounds of fragments": ({"growth": 1e-3, "fragments": 2}, {}, ("no parallel.local.fragments",)),
    "growing rounds that overlap": ({"growth": 1e-3, "overlap_steps": 2}, {}, ("no parallel.local.overlap_steps",)),
    "an average of parameters": ({}, {"optim": {"kind": "adamw", "lr": 1e-3, "ema": 0.9}}, ("optim.ema",)),
    "a master copy": (
        {},
        {"precision": {"params": "bfloat16", "master": "float32"}},
        ("precision.master", "precision.params", "precision.params=float32"),
    ),
    "stale weights": ({}, PIPELINE | {"parallel": {"pipeline": STALE}}, ("parallel.pipeline", "another kind")),
    "a bias of experts": ({}, {"model": {"experts": EXPERTS}}, ("model.experts.balance", "a step changes the bias")),
    "elastic slices": (
        {},
        {"elastic": {"mesh": {"replica": 1}}},
        ("elastic.mesh.replica", "parallel.local.resize=average"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_work_is_refused_with_a_reason(name):
    local, changes, lines = CASES[name]
    run = run_with(local, **changes)
    with pytest.raises(ConfigError) as error:
        prepare(run, run.mesh.abstract())
    assert all(line in str(error.value) for line in lines), str(error.value)


def test_control_what_works_is_not_refused():
    run = run_with({"start": 4, "compress": "int8"})
    assert prepare(run, run.mesh.abstract()).placement.slices == "replica"


def test_verify_refuses_local_updates():
    with pytest.raises(VerificationError, match=r"the layout of a slice with parallel\.local=null"):
        verify(run_with({}))
