"""`meshpar verify` exits with 1 if it finds a fault; docs/guides/verify.md runs it on a config without one."""

from __future__ import annotations

import json
import re
import sys
from contextlib import contextmanager

import jax
import pytest
from jax import lax
from typer.testing import CliRunner

from meshpar import GPT, AxisRules, Lion, MeshLayout, Run, Synthetic, verify
from meshpar.cli import verbs
from meshpar.errors import ConfigError, Problems
from meshpar.mesh.varying import varying
from meshpar.parallel import data
from meshpar.verification.verify import _message


def test_verify_exits_with_1_if_it_finds_a_fault(monkeypatch):
    def twice(grad, axes):
        once = summed(grad, axes)
        return lax.psum(varying(once, ("data",)), "data") if "data" in axes else once

    summed = data.sum_gradient
    monkeypatch.setattr(data, "sum_gradient", twice)
    small = ["model.num_layers=1", "mesh.fsdp=1", "mesh.tensor=1", "rules=[replicated]", "mesh.data=8"]
    result = CliRunner().invoke(verbs(), ["verify", "configs/quickstart.yaml", *small, "--json"])
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.exception
    report = json.loads(result.output)
    assert (report["equal"], report["culprits"]) == (False, ["data=8"])
    assert report["rows"][0]["compared"]["first"]["how"] == "exactly 8x"


def test_a_parameter_whose_gradient_is_only_rounding_is_not_compared(monkeypatch):
    """A bias of the keys changes no attention weight, so its gradient is rounding, of which Lion takes the sign."""
    lines = []

    @contextmanager
    def shown(what, quiet):
        yield lines.append

    monkeypatch.setattr(sys.modules[verify.__module__], "busy", shown)
    run = Run(
        model=GPT(num_layers=1, hidden_size=16, num_heads=2, intermediate_size=32, dropout=0.1),
        data=Synthetic(batch_size=8, seq_len=16),
        optim=Lion(lr=1e-3),
        mesh=MeshLayout(data=2),
        rules=AxisRules(preset="replicated"),
        lowering="auto",
        num_steps=5,
        run_dir="unused",
    )
    proof = verify(run)
    assert proof.is_equal, str(proof)
    assert proof.undecided == ("blocks.attn.k.bias",)
    assert [re.sub(r"[\d.]+ s$", "", line) for line in lines] == [
        "one device, the reference: ",
        *(f"{row.name}: equal, " for row in proof.rows),
    ]
    assert str(proof).splitlines()[-3:] == [
        "not compared, because the gradient is zero except for rounding: parameters of blocks.attn.k.bias",
        "",
        "equal to one device, including random draws: no difference is above 1e-10",
    ]


def test_verify_with_too_few_devices_is_refused(monkeypatch):
    found = jax.devices()[:1]
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: found)
    result = CliRunner().invoke(verbs(), ["verify", "configs/quickstart.yaml"])
    assert str(result.exception) == "8 CPU devices are needed, 1 are available; call meshpar.simulate(8) first"


def test_an_error_that_lists_problems_is_shown_with_its_first_problem():
    problems = Problems()
    problems.add("the loss", "differs from device to device along tensor", "psum it")
    problems.add("the count", "differs too", "psum it")
    with pytest.raises(ConfigError) as error:
        problems.raise_any(ConfigError, "the results differ:")
    assert _message(error.value) == (
        "ConfigError: the results differ: the loss differs from device to device along tensor"
    )
