"""`explain` accepts a rule if and only if the step with it can be traced."""

from __future__ import annotations

from itertools import product

import jax
import pytest

from meshpar.errors import ConfigError, MeshparError
from meshpar.experiment.config import Run
from meshpar.experiment.prepare import Prepared, prepare
from meshpar.mesh.layout import AXES
from meshpar.sharding.rules import DIMS

SIZES = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 64,
}
MODELS = {
    "llama": {"model": {"kind": "llama", **SIZES}},
    "gpt": {"model": {"kind": "gpt", **SIZES, "max_seq_len": 16}},
    "lora": {"model": {"kind": "llama", **SIZES}, "lora": {"rank": 2}},
    "experts": {"model": {"kind": "llama", **SIZES, "experts": {"num": 4, "per_token": 2, "intermediate_size": 16}}},
}
HAS = {"gpt": ("positions",), "lora": ("rank",), "experts": ("experts", "router", "embed", "mlp")}
SWEEP = [
    (model, {dim: [axis]}, axis, lowering)
    for model, dim, axis, lowering in product(MODELS, DIMS, AXES, ["manual", "auto"])
    if (dim != "experts" if model == "llama" else dim in HAS[model])
]
SHARDED = ("residual_seq", "heads", "kv_heads", "mlp", "vocab")
TOGETHER = [
    ("llama", {dim: ["tensor"] for dim, sharded in zip(SHARDED, which, strict=True) if sharded}, "tensor", "manual")
    for which in product([False, True], repeat=len(SHARDED))
    if any(which)
]
SAMPLE = [
    *(case for case in SWEEP if case[2] == "tensor" and case[3] == "manual"),
    *(case for case in SWEEP if case[2] == "data" and case[3] == "manual" and not {"heads", "mlp"} & case[1].keys()),
    *(
        case
        for case in SWEEP
        if case[2] == "context" and case[3] == "auto" and case[1].keys() <= {"seq", "residual_seq"}
    ),
    *TOGETHER[1::6],
]
SILENT = ("no parameter has such a dim", "GSPMD has no pipeline")
"""Reasons to refuse rules that JAX may trace, but which do nothing."""
CASES = [pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.slow) for case in SWEEP + TOGETHER]


def run_with(model: str, rules: dict[str, list[str]], axis: str, lowering: str) -> Run:
    return Run.model_validate({
        **MODELS[model],
        "data": {"kind": "synthetic", "vocab_size": 64, "batch_size": 8, "seq_len": 16},
        "optim": {"kind": "adamw", "lr": 1e-3},
        "mesh": {axis: 2},
        "rules": {"preset": ["replicated"]} | rules,
        "lowering": lowering,
        "num_steps": 2,
        "run_dir": "unused",
    })  # fmt: skip


def trace(prepared: Prepared) -> None:
    jax.eval_shape(prepared.step, prepared.placement.structs, prepared.batch)


@pytest.mark.sample(12)
@pytest.mark.parametrize(("model", "rules", "axis", "lowering"), CASES)
def test_explain_accepts_what_can_be_traced(model, rules, axis, lowering, monkeypatch):
    run = run_with(model, rules, axis, lowering)
    mesh = run.mesh.abstract()
    try:
        trace(prepare(run, mesh))
    except MeshparError as error:
        refused = error
    else:
        return
    if any(silent in str(refused) for silent in SILENT):
        return
    # Nothing is refused that would work.
    monkeypatch.setattr("meshpar.models.decoder.check_rules", lambda *_: None)
    with pytest.raises((ValueError, TypeError)):
        trace(prepare(run, mesh))


def refusal(run: Run) -> str:
    with pytest.raises(ConfigError) as error:
        prepare(run, run.mesh.abstract())
    return str(error.value)


def test_all_rules_that_do_not_fit_are_reported_at_once():
    run = run_with("llama", {"seq": ["data"], "residual_seq": ["data"]}, "data", "manual")
    assert (
        refusal(run)
        == """\
the parts of this config do not fit each other:
  rules.seq
    cannot be sharded over data: batch is sharded over it already, and no parameter has such a dim
    rules.seq=[]
  rules.residual_seq
    cannot be sharded over data: batch is sharded over it already, and no parameter has such a dim
    rules.residual_seq=[]
  rules.residual_seq
    cannot be sharded over data: seq is sharded over it already, and no parameter has such a dim
    rules.residual_seq=[]"""
    )


def test_a_refused_rule_and_an_array_that_does_not_fit_are_reported_together():
    run = run_with("experts", {"seq": ["data"], "kv_heads": ["tensor"], "heads": ["tensor"]}, "data", "manual")
    run = run.model_copy(update={"mesh": run.mesh.model_copy(update={"tensor": 4})})
    assert (
        refusal(run)
        == """\
the parts of this config do not fit each other:
  rules.seq
    cannot be sharded over data: batch is sharded over it already, and no parameter has such a dim
    rules.seq=[]
  blocks.attn.k.kernel  float32[2, 16, 2, 4]  (layers, embed, kv_heads, head_dim)
    kv_heads = 2 is not divisible by tensor = 4    rule kv_heads -> tensor   (rules.kv_heads, partition)
    either mesh.tensor=2, or rules.kv_heads=[] to replicate it (at most +768 B per device)
  blocks.attn.v.kernel  float32[2, 16, 2, 4]  (layers, embed, kv_heads, head_dim)
    kv_heads = 2 is not divisible by tensor = 4    rule kv_heads -> tensor   (rules.kv_heads, partition)
    either mesh.tensor=2, or rules.kv_heads=[] to replicate it (at most +768 B per device)"""
    )


def test_an_axis_of_size_1_shards_nothing_and_is_never_refused():
    run = run_with("llama", {"head_dim": ["expert"], "seq": ["context"], "heads": ["tensor"]}, "tensor", "manual")
    trace(prepare(run, run.mesh.abstract()))


def test_control_without_the_check_a_rule_fails_in_the_step(monkeypatch):
    monkeypatch.setattr("meshpar.models.decoder.check_rules", lambda *_: None)
    run = run_with("llama", {"seq": ["data"]}, "data", "manual")
    with pytest.raises(Exception, match="duplicate entries"):
        trace(prepare(run, run.mesh.abstract()))
