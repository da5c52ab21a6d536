"""`explain` accepts a rule if and only if the step with it can be traced."""

from __future__ import annotations

from itertools import product

import jax
import pytest

from meshpar.errors import ConfigError, MeshparError
from meshpar.experiment.config import Run
from meshpar.experiment.prepare import Prepared, prepare
from meshpar.mesh.layout import AXES
from meshpar.nn.supported import GSPMD
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
}
HAS = {"gpt": "positions", "lora": "rank"}
SWEEP = [
    (model, {dim: [axis]}, axis, lowering)
    for model, dim, axis, lowering in product(MODELS, DIMS, AXES, ["manual", "auto"])
    if (model == "llama" or dim == HAS[model]) and dim != "experts"
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
SILENT = ("no parameter has such a dim", "GSPMD has no pipeline", "heads must be sharded over the same axes")
"""Reasons to refuse rules that JAX may trace, but which do nothing or give nan."""
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
    monkeypatch.setattr("meshpar.models.decoder.check_supported", lambda *_: None)
    with pytest.raises((ValueError, TypeError)):
        trace(prepare(run, mesh))


def test_all_rules_that_do_not_fit_are_reported_at_once():
    rules = {"head_dim": ["tensor"], "layers": ["data"], "residual_seq": ["tensor"]}
    run = run_with("llama", rules, "tensor", "manual")
    run = run.model_copy(update={"mesh": run.mesh.model_copy(update={"data": 2})})
    with pytest.raises(ConfigError) as error:
        prepare(run, run.mesh.abstract())
    assert (
        str(error.value)
        == """\
the parts of this config do not fit each other:
  rules.residual_seq
    is sharded over tensor, so vocab must be, too: not []
    rules.residual_seq=[], or rules.vocab=[tensor]
  rules.layers
    cannot be sharded over data: a device needs all layers of its stage
    rules.layers=[]
  rules.head_dim
    cannot be sharded over tensor: attention needs whole heads
    rules.head_dim=[]"""
    )


def test_a_refused_rule_and_an_array_that_does_not_fit_are_reported_together():
    rules = {"residual_seq": ["tensor"], "kv_heads": ["tensor"], "heads": ["tensor"]}
    run = run_with("llama", rules, "tensor", "manual")
    run = run.model_copy(update={"mesh": run.mesh.model_copy(update={"tensor": 4})})
    with pytest.raises(ConfigError) as error:
        prepare(run, run.mesh.abstract())
    assert (
        str(error.value)
        == """\
the parts of this config do not fit each other:
  rules.residual_seq
    is sharded over tensor, so vocab must be, too: not []
    rules.residual_seq=[], or rules.vocab=[tensor]
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


def test_key_heads_over_a_part_of_the_axes_of_the_heads_are_refused():
    """They would be traced, and give nan: a device would look for key heads that it does not hold."""
    run = run_with("llama", {"heads": ["context", "tensor"], "kv_heads": ["tensor"]}, "tensor", "manual")
    run = run.model_copy(update={"mesh": run.mesh.model_copy(update={"context": 2})})
    with pytest.raises(ConfigError, match=r"heads must be sharded over the same axes: not \[context, tensor\]"):
        prepare(run, run.mesh.abstract())


@pytest.mark.parametrize("sharding", [*filter(None, run_with("gpt", {}, "tensor", "manual").model.sharding), GSPMD])
def test_layers_declare_standard_dims_and_what_they_refer_to(sharding):
    for dim, supported in sharding.items():
        assert {dim, supported.same_as or "embed", supported.within or "embed"} <= set(DIMS)
        assert supported.why or supported.partition


def test_control_without_the_check_a_rule_fails_in_the_step(monkeypatch):
    monkeypatch.setattr("meshpar.models.decoder.check_supported", lambda *_: None)
    run = run_with("llama", {"head_dim": ["tensor"]}, "tensor", "manual")
    with pytest.raises(TypeError, match="incompatible shapes"):
        trace(prepare(run, run.mesh.abstract()))
