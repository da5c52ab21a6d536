"""Every shipped config loads, comes back from its own YAML, fits its mesh, and traces a whole step."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from meshpar.config import flatten, schema, to_yaml
from meshpar.errors import ConfigError
from meshpar.experiment.config import Run, load
from meshpar.experiment.prepare import prepare
from meshpar.train.step import with_rows

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_comes_back_from_its_own_yaml(path, tmp_path):
    run = load(path)
    (tmp_path / "again.yaml").write_text(to_yaml(run))
    assert load(tmp_path / "again.yaml") == run


@pytest.mark.sample(8)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_traces_a_whole_step_on_an_abstract_mesh(path):
    run = load(path)
    prepared = prepare(run, run.mesh.abstract())
    state, metrics = jax.eval_shape(prepared.step, prepared.placement.structs, prepared.batch)
    assert jax.tree.map(lambda x: x.shape, state.params) == jax.tree.map(lambda s: s.shape, prepared.specs)
    of_experts = {"balance_loss", "experts_load", "experts_max_load", "experts_entropy"} if run.model.experts else set()
    assert set(metrics) == {"loss", "grad_norm", "tokens", "skipped", "lr"} | of_experts
    assert with_rows(prepared.batch)["rows"].shape == (run.data.batch_size,)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_opens_with_what_it_is_what_it_runs_on_and_its_command(path):
    lines = path.read_text().splitlines()
    comments = [line for line in lines[:6] if line.startswith("#")]
    assert len(comments) >= 3
    assert any(f"configs/{path.name}" in line and "meshpar " in line for line in comments)


def test_there_are_few_keys_beside_those_of_experts():
    """A new key raises this number, so that nobody adds one without a thought: the last was `checkpoints.mirror`."""
    keys = [[key for key in flatten(load(path)) if not key.startswith("model.experts.")] for path in CONFIGS]
    assert max(map(len, keys)) <= 110


def test_the_schema_knows_every_key_and_its_text():
    described = schema(Run)
    assert set(described["properties"]) == set(Run.model_fields) | {"extends"}
    assert "gradients are reduced once" in described["properties"]["num_microbatches"]["description"]


def test_a_kind_that_is_a_mapping_is_an_error():
    """Found by fuzzing: a mapping is not hashable, so it cannot be looked up among the kinds."""
    with pytest.raises(ConfigError, match="no kind is called"):
        load(CONFIGS[0], ["model.kind.of=llama"])
