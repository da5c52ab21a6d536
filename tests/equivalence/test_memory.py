"""Offloading changes no number; bfloat16 parameters have one device's gradients, and round alike in any layout."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from meshpar.cost.flat import bodies
from meshpar.data import Synthetic
from meshpar.experiment.actions import fit
from meshpar.experiment.config import Offload, Precision, Run
from meshpar.models import GPT
from meshpar.nn.remat import Remat
from meshpar.optim import AdamW
from meshpar.parallel import data
from meshpar.tree import flatten_with_paths
from tests.comparison import largest_difference
from tests.equivalence.conftest import on_one_device, outcome, prepared

CASES = [
    ("data2_fsdp2_tensor2", "manual"),
    *[pytest.param(*case, marks=pytest.mark.slow) for case in [("zero1", "manual"), ("zero3", "auto")]],
]


@pytest.mark.parametrize(("layout", "lowering"), CASES)
def test_an_offloaded_run_is_equal_to_one_device(layout, lowering):
    remat = Remat(save=("q", "k"), offload=("input", "attn", "gate"))
    run = prepared("llama", layout, lowering, 1, fields={"remat": remat}, offload=Offload(optimizer="host"))
    assert outcome(run).difference(on_one_device("llama")) < 1e-10
    kinds = {path: x.sharding.memory_kind for path, x in flatten_with_paths(run.compile_init()().opt_state).items()}
    assert kinds["0.mu.embedding"] == kinds["0.nu.blocks.attn.q.kernel"] == "pinned_host"
    assert kinds["0.count"] == "device"


@pytest.mark.slow
def test_an_offloaded_run_resumes_on_the_device(tmp_path):
    """The average of its parameters, which evaluations use, is offloaded too."""

    def trained(name, num_steps, optimizer):
        run = Run(
            model=GPT(num_layers=1, hidden_size=8, num_heads=2, intermediate_size=8, vocab_size=29, max_seq_len=8),
            data=Synthetic(batch_size=8, seq_len=8, vocab_size=29),
            optim=AdamW(lr=1e-2, ema=0.9),
            mesh={"fsdp": 8},
            rules="zero1",
            precision=Precision(params="float64", compute="float64"),
            offload=Offload(optimizer=optimizer),
            num_steps=num_steps,
            run_dir=tmp_path / name,
            loggers=(),
        )
        return fit(run, json=True)

    whole = trained("whole", 4, "device")
    trained("parts", 2, "host")
    resumed = trained("parts", 4, "device")
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-10)
    texts = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "parts")]
    records = [[json.loads(line) for line in text.splitlines()] for text in texts]
    losses = [
        [record["loss"] for record in found if record["kind"] == "evaluation" and record["step"] == 4]
        for found in records
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-10)
    assert losses[0]


PRECISION = {"params": "bfloat16", "compute": "float64", "gradients": "float64"}


def in_bfloat16(layout="zero3", lowering="manual"):
    """The optimizer's state is in float64, from which `outcome` reads the gradients."""
    return prepared("llama", layout, lowering, 1, precision=Precision(**PRECISION, master="float64"))


def test_the_gradient_of_a_bfloat16_shard_is_that_of_one_device(monkeypatch):
    """Control: where the stored array itself is differentiated, the gradient is rounded to bfloat16."""

    def gradients(run):
        return [np.asarray(x) for x in jax.tree.leaves(outcome(run).gradients)]

    expected = gradients(in_bfloat16(None, "auto"))
    assert largest_difference(gradients(in_bfloat16()), expected) < 1e-10
    monkeypatch.setattr(data, "_mixed", lambda x, ctx: x)
    assert largest_difference(gradients(in_bfloat16()), expected) > 1e-5


def test_no_layer_is_held_in_the_dtype_of_its_gradient(monkeypatch):
    """Control: a cast before the loop over layers, for the sake of the gradient's dtype, converts all of them."""

    def converted():
        (body,) = bodies(in_bfloat16().countable_step)
        casts = [one for one in body.eqns if one.primitive.name == "convert_element_type"]
        return [one for one in casts if one.invars[0].aval.dtype == "bfloat16" and one.outvars[0].aval.ndim > 2]

    assert converted() == []
    monkeypatch.setattr(data, "_mixed", lambda x, ctx: x.astype("float64"))
    assert len(converted()) == 7  # the kernels of attention and MLP


@pytest.mark.slow
def test_stochastic_rounding_is_the_same_in_any_layout():
    """To 1e-9, because the gradient of a key's bias is a rounding error. Control: rounding to nearest differs."""

    def params(layout, lowering, **more):
        got = outcome(prepared("gpt_gqa_tied", layout, lowering, 1, precision=Precision(**PRECISION | more)))
        return [np.asarray(x, np.float64) for x in jax.tree.leaves(got.params)]

    on_one_device = params(None, "auto", rounding="stochastic")
    on_eight_devices = params("data2_fsdp2_tensor2", "manual", rounding="stochastic")
    nearest = params(None, "auto", rounding="nearest")
    assert largest_difference(on_one_device, on_eight_devices) < 1e-9
    assert largest_difference(on_one_device, nearest) > 1e-5
