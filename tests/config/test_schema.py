"""The JSON schema accepts configs that load, and refuses mistakes that one file alone shows."""

from __future__ import annotations

import jsonschema
import pytest
import yaml

from meshpar.config import schema, to_yaml
from meshpar.experiment.config import Run, load
from tests.config.test_configs import CONFIGS

QUICKSTART = next(path for path in CONFIGS if path.stem == "quickstart")


@pytest.fixture(scope="module")
def editor():
    """Whether an editor, which parses YAML itself, would accept a config."""
    described = schema(Run)
    jsonschema.Draft202012Validator.check_schema(described)
    return jsonschema.Draft202012Validator(described).is_valid


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_that_ships_fits_the_schema(path, editor):
    assert editor(yaml.safe_load(path.read_text()))
    assert editor(yaml.safe_load(to_yaml(load(path))))


SHORT = {
    "a preset": {"rules": "fsdp"},
    "presets": {"rules": ["fsdp", "megatron"]},
    "a preset and a rule": {"rules": {"preset": "fsdp", "kv_heads": []}},
    "kinds of loggers": {"loggers": ["tensorboard", {"kind": "wandb", "mode": "offline"}]},
    "globs": {"freeze": ["blocks.**", {"paths": "head", "until": 3}]},
    "a loss of one's own": {"loss": "model:loss"},
    "how often": {"checkpoints": 100},
    "kinds of compression": {"parallel": {"gradient_reduction": {"within": "bf16", "across": "int8"}}},
    "limits": {"contract": {"all_to_all": 0, "bytes_per_axis": {"tensor": "traced * 1.01"}}},
    "part of a section, over another file": {"extends": "quickstart.yaml", "optim": {"schedule": {"final": "1e-1"}}},
}
WRONG = {
    "a key": {"modle": {}},
    "a key of a section": {"model": {"kind": "llama", "widht": 64}},
    "a kind": {"model": {"kind": "lama"}},
    "a kind of logger": {"loggers": ["tensorbord"]},
    "a text for a number": {"optim": {"kind": "adamw", "lr": "fast"}},
    "a number for a rule": {"rules": {"embed": 3}},
    "a number for rules": {"rules": 3},
    "a number for a glob": {"freeze": [3]},
    "nothing for a section": {"data": None},
    "a number below its bound": {"num_steps": 0},
}


@pytest.mark.parametrize("case", SHORT)
def test_a_shorthand_fits_the_schema_and_loads(case, editor, tmp_path):
    whole = yaml.safe_load(QUICKSTART.read_text()) | SHORT[case]
    assert editor(whole)
    (tmp_path / "quickstart.yaml").write_text(QUICKSTART.read_text())
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(whole))
    if case != "a loss of one's own":  # there is no such module
        load(tmp_path / "config.yaml")


@pytest.mark.parametrize("case", WRONG)
def test_control_a_mistake_does_not_fit_the_schema(case, editor):
    assert not editor(yaml.safe_load(QUICKSTART.read_text()) | WRONG[case])


def test_control_a_section_is_required_unless_the_file_extends_another(editor):
    lacks = {key: value for key, value in yaml.safe_load(QUICKSTART.read_text()).items() if key != "model"}
    assert not editor(lacks)
    assert editor(lacks | {"extends": "quickstart.yaml"})
    assert editor(lacks | {"init": {"from_hf": "models/qwen"}})
    assert not editor({key: value for key, value in lacks.items() if key != "data"} | {"init": {"from_hf": "qwen"}})
