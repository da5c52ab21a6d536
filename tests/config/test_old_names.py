"""Keys and commands of older versions are errors that name the new ones; checkpoints with old names are read."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from meshpar import CheckpointError, CheckpointMetadata, ConfigError, Llama, Run, checkpoints, load
from meshpar.checkpoint import checksums
from meshpar.checkpoint.saved import find
from meshpar.config import schema
from meshpar.synonyms import RENAMED, with_new_names
from tests.config.test_configs import CONFIGS

QUICKSTART = next(path for path in CONFIGS if path.stem == "quickstart")


@pytest.mark.parametrize("old", [old for old in RENAMED if not old.startswith(("rules.", "init."))])
def test_an_old_key_is_an_error_that_names_the_new_one(old):
    with pytest.raises(ConfigError) as refused:
        load(QUICKSTART, [f"{old}=1"])
    assert str(refused.value).endswith(f"  {old} (command line)\n    unknown key\n    {old} is now {RENAMED[old]}")


@pytest.mark.parametrize("old", ["init.take", "init.leave"])
def test_an_old_key_of_an_optional_section_names_the_new_one(old):
    with pytest.raises(ConfigError, match=rf"{old} is now {RENAMED[old]}"):
        load(QUICKSTART, ["init={from_checkpoint: runs/other}", f"{old}=[params.**]"])


def test_an_old_rule_names_the_new_one():
    with pytest.raises(ConfigError, match=r"rules\.norm_seq is now rules\.residual_seq"):
        load(QUICKSTART, ["rules.norm_seq=[tensor]"])


def test_an_old_key_of_a_model_alone_names_the_new_one():
    with pytest.raises(ConfigError, match="width is now hidden_size"):
        Llama(num_layers=1, width=8, num_heads=2, intermediate_size=8)  # pyright: ignore


def test_old_names_that_a_user_chose_are_left_alone():
    """They are arguments of the user's own model, or dims of its arrays."""
    plain = {"model": {"kind": "import", "arguments": {"width": 8}}, "rules": {"width": ["data"]}}
    assert with_new_names(plain) == plain


def test_every_new_name_is_a_key_of_a_config():
    described = json.dumps(schema(Run))
    assert all(f'"{new.rpartition(".")[2]}"' in described for new in RENAMED.values() if not new.startswith("rules."))


def test_the_old_command_names_the_new_one(command):
    result = command("prove", QUICKSTART, "num_steps=3", "--json")
    assert (result.code, result.err) == (2, "meshpar: meshpar prove is now meshpar verify\n")


OLD = {"model": {"kind": "llama", "width": 4, "vocab_multiple": 2}, "adapt": None, "seed": 0}
NEW = {"model": {"kind": "llama", "hidden_size": 4, "pad_vocab_to_multiple": 2}, "lora": None, "seed": 0}
STATE = {"params": {"table": jnp.arange(8.0).reshape(2, 4)}, "opt_state": {"mu": {"table": jnp.ones((2, 4))}}}


@pytest.fixture
def old_checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of the second format, which has the old names."""
    with checkpoints(tmp_path, about=CheckpointMetadata(config=OLD)) as opened:
        opened.save(3, STATE)
    meta = tmp_path / "3" / "meta.json"
    plain = json.loads(meta.read_text())
    meta.write_text(json.dumps(plain | {"format": 2}))
    (tmp_path / "3" / checksums.FILE).unlink()
    checksums.write(tmp_path / "3")
    return tmp_path


def wanted() -> dict:
    tables = jax.eval_shape(lambda: STATE)
    return {
        "params": {"embedding": tables["params"]["table"]},
        "opt_state": {"mu": {"embedding": tables["opt_state"]["mu"]["table"]}},
    }


def test_a_checkpoint_with_old_names_is_restored_under_the_new(old_checkpoint):
    checkpoint = find(old_checkpoint)
    assert checkpoint.meta["config"] == NEW
    assert sorted(checkpoint.described) == ["opt_state.mu.embedding", "params.embedding"]
    restored = checkpoint.restore(wanted())
    assert (restored["params"]["embedding"] == STATE["params"]["table"]).all()
    assert (checkpoint.on_host("params.embedding") == STATE["params"]["table"]).all()


def test_damage_of_an_old_checkpoint_is_seen(old_checkpoint):
    chunk = next(path for path in (old_checkpoint / "3/state/params.table").iterdir() if path.name[0].isdecimal())
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"x")
    for read in (
        lambda: find(old_checkpoint).on_host("params.embedding"),
        lambda: find(old_checkpoint).restore(wanted()),
    ):
        with pytest.raises(CheckpointError, match="damaged"):
            read()


def test_control_names_in_the_current_format_are_not_translated(tmp_path):
    with checkpoints(tmp_path, about=CheckpointMetadata(config=OLD)) as opened:
        opened.save(3, STATE)
    assert find(tmp_path).meta["config"] == OLD
    assert sorted(find(tmp_path).described) == ["opt_state.mu.table", "params.table"]
