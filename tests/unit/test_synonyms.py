"""A key or a name of another framework is an error that proposes meshpar's."""

from __future__ import annotations

import pytest

from meshpar.config import schema
from meshpar.errors import ConfigError, nearest
from meshpar.experiment.config import Run, load
from meshpar.mesh.layout import AXES
from meshpar.sharding.rules import PRESETS
from meshpar.synonyms import SYNONYMS
from meshpar.train.loop.events import EVENTS
from tests.config.test_configs import CONFIGS

QUICKSTART = next(path for path in CONFIGS if path.stem == "quickstart")
MEANT = {
    "learning_rate": "optim.lr",
    "optim.learning_rate": "optim.lr",
    "model.d_model": "model.hidden_size",
    "hidden_size": "model.hidden_size",
    "model.n_layers": "model.num_layers",
    "model.num_hidden_layers": "model.num_layers",
    "model.ffn_dim": "model.intermediate_size",
    "model.num_key_value_heads": "model.num_kv_heads",
    "mesh.tp": "mesh.tensor",
    "mesh.TP": "mesh.tensor",
    "tp": "mesh.tensor",
    "mesh.dp": "mesh.data",
    "mesh.pp": "mesh.pipe",
    "mesh.cp": "mesh.context",
    "mesh.ep": "mesh.expert",
    "mesh.FSDP": "mesh.fsdp",
    "batch": "data.batch_size",
    "data.per_device_train_batch_size": "data.batch_size",
    "batch_size": "data.batch_size",
    "max_steps": "num_steps",
    "gradient_accumulation_steps": "num_microbatches",
    "optim.schedule.num_warmup_steps": "optim.schedule.warmup_steps",
    "save_steps": "checkpoints.every",
    "model.num_layer": "model.num_layers",
}


@pytest.mark.parametrize("key", MEANT)
def test_a_key_of_another_framework_names_ours(key):
    with pytest.raises(ConfigError) as refused:
        load(QUICKSTART, [f"{key}=1"])
    assert str(refused.value).endswith(f"  {key} (command line)\n    unknown key\n    did you mean {MEANT[key]}?")


@pytest.mark.parametrize(
    ("name", "names", "ours"),
    [
        ("FSDP", PRESETS, "fsdp"),
        ("tp", PRESETS, "megatron"),
        ("TP", AXES, "tensor"),
        ("Adam", ["adamw", "lion", "sgd"], "adamw"),
        ("AdamW", ["adamw", "lion", "sgd"], "adamw"),
        ("tensr", AXES, "tensor"),
        ("zebra", AXES, None),
        ("learning_rate", AXES, None),
    ],
)
def test_a_name_of_another_framework_is_near_to_ours(name, names, ours):
    assert nearest(name, names) == ours


def test_every_proposed_word_is_a_key_a_kind_a_preset_or_an_event():
    described = schema(Run)
    sections = [described["properties"]]
    sections += [d.get("properties") or d["anyOf"][0]["properties"] for d in described["$defs"].values()]
    ours = {key for section in sections for key in section} | set(PRESETS) | set(EVENTS)
    kinds = {section["kind"]["const"] for section in sections if "const" in section.get("kind", {})}
    named = {word.rpartition(".")[2] for meant in SYNONYMS.values() for word in meant}
    assert named - ours - kinds == {"bfloat16", "float32", "float64"}


def test_a_preset_of_another_framework_names_ours():
    with pytest.raises(ConfigError, match="no preset is called 'FSDP'; did you mean fsdp\\?"):
        load(QUICKSTART, ["rules=[FSDP]"])
