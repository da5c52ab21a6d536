"""Flax models that are not llamas are planned over data, fsdp, tensor, expert and pipe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import meshpar
from meshpar.experiment import actions
from meshpar.experiment.config import Run
from meshpar.experiment.prepare import prepare
from meshpar.interop import user_code
from meshpar.planning.estimate import work_of
from meshpar.planning.layers import layers_of
from tests.program.planned_models import dims

ROOT = Path(__file__).parents[2]
STACKS = {"encoder": ("encoder",), "translator": ("encoder", "decoder"), "mixture": ("experts",)}
STACKS["vit"] = ("encoder", "pictures")
LOSS = {"encoder": "classes", "translator": "translation", "mixture": "classes"}
PIPES = {"mesh": {"pipe": 2, "tensor": 2, "data": 2}, "rules": {"preset": ["pipeline", "megatron"], "unnamed": []}}
PIPES["parallel"] = {"pipeline": {"kind": "1f1b", "num_microbatches": 4}}
SHARDS = {"mesh": {"fsdp": 4, "tensor": 2}, "rules": {"preset": ["fsdp", "megatron"], "unnamed": []}}

pytestmark = pytest.mark.filterwarnings("ignore:the loss returns a mean")


def run_of(name, **keys):
    module = "tests.program.planned_models"
    loss = f"{module}:{LOSS[name]}" if name in LOSS else {"kind": "classify"}
    data = {"kind": "synthetic", "vocab_size": 256, "batch_size": 64, "seq_len": 64}
    if name == "vit":
        data = {"kind": "import", "target": f"{module}:pictures", "batch_size": 64}
    for target in (name, LOSS.get(name, name), "pictures"):
        user_code.permit(f"{module}:{target}", None)
    return Run.model_validate(
        {
            "model": {"kind": "import", "target": f"{module}:{name}", "dims": dims(*STACKS[name])},
            "loss": loss,
            "data": data,
            "optim": {"kind": "adamw", "lr": 1e-3},
            "num_steps": 1,
            "run_dir": "unused",
            "rules": {"preset": "replicated", "unnamed": []},
            **keys,
        }
    )


@pytest.mark.parametrize(("name", "num_layers"), [("encoder", 4), ("translator", 8)])
def test_the_layers_of_a_users_model_are_those_at_which_its_trace_is_cut(name, num_layers):
    stack = layers_of(run_of(name), "gpu")
    assert stack and (stack.num_layers, stack.multiple) == (num_layers, 1)


@pytest.mark.slow
def test_an_encoder_decoder_is_planned_over_stages():
    fix = ["mesh.pipe=2", "mesh.tensor=2", "parallel.pipeline.kind=1f1b", "num_microbatches=4", "mesh.context=1"]
    planned = meshpar.plan(run_of("translator"), "h100:1x8", fix=fix)
    assert {one.layout.size("pipe") for one in planned.ranked} == {2}
    assert planned.ranked[0].work.stages is not None
    assert any(term.startswith("waits for tensor") for term in planned.ranked[0].estimate.terms)


def test_a_mixture_is_planned_over_experts():
    """What the estimate says is sent over the axis is what the trace sends: tokens to experts, and back."""
    run = run_of("mixture")
    fix = ["mesh.expert=4", "mesh.data=1", "mesh.tensor=1", "num_microbatches=1"]
    (best, *_) = meshpar.plan(run, "h100:1x4", fix=fix).ranked
    assert best.layout.mesh == {"expert": 4} and best.layout.presets == ["experts"]
    assert {"all_to_all"} <= {one.kind for one in best.work.waits if one.axes == ("expert",)}


def test_a_model_without_experts_or_layers_is_refused_by_what_it_lacks():
    for name, key, why in (
        ("encoder", "expert", "a dim called experts"),
        ("mixture", "pipe", "no stack of equal layers"),
    ):
        with pytest.raises(meshpar.ConfigError, match=why):
            meshpar.plan(run_of(name), "h100:1x4", fix=[f"mesh.{key}=2"])


def ratio(name, keys):
    """The estimated bytes over those that XLA:CPU compiles on devices of this process."""
    run = run_of(name, **keys)
    work = work_of(prepare(run))
    return (work.states_bytes + work.step_bytes) / actions.inspect(run).memory.total


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "translator"])
def test_a_plan_over_pipe_and_tensor_holds_what_is_compiled(name):
    assert ratio(name, PIPES) == pytest.approx(1, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "translator"])
def test_a_plan_over_pipe_and_tensor_holds_what_is_compiled_for_gpus(name):
    """Needs the extra gpu-target. A compile-only platform has to be chosen before JAX starts."""
    program = [sys.executable, "-m", "tests.program.planned_memory", name, "h100:1x8"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=900, check=True)
    assert float(done.stdout.split()[-1]) == pytest.approx(1, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder", "translator"])
def test_a_plan_over_fsdp_and_tensor_holds_about_what_is_compiled(name):
    assert 0.95 < ratio(name, SHARDS) < 1.08
