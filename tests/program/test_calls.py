"""Every verb of the command line is a function, with the same result."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest

import meshpar
from meshpar.config import to_yaml


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return meshpar.Run(
        model={"kind": "llama", "num_layers": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16},
        data={"kind": "synthetic", "batch_size": 8, "seq_len": 8},
        optim={"kind": "adamw", "lr": 1e-3},
        mesh={"fsdp": 8},
        rules="fsdp",
        num_steps=2,
        run_dir=tmp_path_factory.mktemp("runs") / "one",
    )


@pytest.fixture
def printed(run, command, tmp_path):
    """Runs a command on the run, and reads the JSON that it prints."""
    (tmp_path / "config.yaml").write_text(to_yaml(run))
    return lambda verb, *words: json.loads(command(verb, tmp_path / "config.yaml", *words, "--json").out)


def as_printed(result):
    return json.loads(json.dumps(result.as_json()))


def test_explain_returns_what_the_command_prints(run, printed):
    assert as_printed(meshpar.explain(run)) == printed("explain")
    assert as_printed(meshpar.explain(run, "head")) == printed("explain", "head") != printed("explain")


def test_inspect_returns_what_the_command_prints(run, printed):
    assert as_printed(meshpar.inspect(run)) == printed("inspect")


def test_inspect_reads_a_compiled_program_too_by_position_and_by_name():
    product, sum_ = (jax.jit(f).lower(jnp.ones((16, 16))).compile() for f in (lambda x: x @ x, lambda x: x + x))
    assert meshpar.inspect(product) == meshpar.inspect(compiled=product)
    assert meshpar.inspect(product).flops == 2 * 16**3
    assert meshpar.inspect(sum_).flops == 0


def test_inspect_refuses_options_of_a_run_for_a_compiled_program():
    with pytest.raises(TypeError, match="target"):
        meshpar.inspect("ENTRY main {\n}", target="v5e:2x4")


def test_inspect_refuses_an_unknown_machine_and_leaves_jax_alone(run):
    before = jax.config.jax_enable_compilation_cache
    with pytest.raises(meshpar.MeshError, match="nonsense: not a machine; write chip:shape, as in v5e:4x4"):
        meshpar.inspect(run, target="nonsense")
    assert jax.config.jax_enable_compilation_cache == before
