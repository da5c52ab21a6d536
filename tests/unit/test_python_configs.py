"""A config in Python reads as a file does: the same shorthands, the same types, the same errors."""

from __future__ import annotations

import inspect
import json
import pydoc
import re
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pydantic
import pytest
import yaml

import meshpar
from meshpar.collectives import Int8
from meshpar.config import Config, load, schema, to_yaml
from meshpar.errors import ConfigError, ShardingError
from meshpar.experiment.config import Run
from meshpar.optim.freeze import Freeze
from meshpar.sharding.rules import PRESETS
from tests.command import CONFIG
from tests.config import checked_types

PLAIN = {
    "model": {"kind": "llama", "num_layers": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8},
    "data": {"kind": "synthetic"},
    "optim": {"kind": "adamw", "lr": 1},
    "num_steps": 3,
    "run_dir": "runs/one",
}
INDENTED = "\n    "


def in_a_file(folder: Path, keys: dict) -> Run:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(PLAIN | keys))
    return load(Run, path)


SHORT = {
    "a preset": ({"rules": "fsdp"}, "rules", meshpar.AxisRules(preset=("fsdp",))),
    "presets": ({"rules": ["fsdp", "megatron"]}, "rules", meshpar.AxisRules(preset=("fsdp", "megatron"))),
    "a rule": ({"rules": {"embed": ["fsdp"]}}, "rules", meshpar.AxisRules(embed=("fsdp",))),
    "one preset by its key": ({"rules": {"preset": "fsdp"}}, "rules", meshpar.AxisRules(preset=("fsdp",))),
    "a glob": ({"freeze": ["blocks.**"]}, "freeze", (Freeze(paths=("blocks.**",)),)),
    "globs": ({"freeze": [["a", "b"], {"paths": "c"}]}, "freeze", (Freeze(paths=("a", "b")), Freeze(paths=("c",)))),
    "steps between checkpoints": ({"checkpoints": 5}, "checkpoints", meshpar.Retention(every=5)),
    "a kind of logger": ({"loggers": ["wandb"]}, "loggers", (meshpar.WandB(),)),
    "a loss of one's own": ({"loss": "mine:loss"}, "loss", meshpar.LossConfig(target="mine:loss")),
    "a kind of compression": (
        {"parallel": {"gradient_reduction": {"across": "int8"}}},
        "parallel",
        meshpar.Parallel(gradient_reduction=meshpar.Reduce(across=Int8())),
    ),
    "a limit": ({"contract": {"all_to_all": 0}}, "contract", meshpar.Contract(all_to_all={"times": 0})),
    "a tokenizer file": (
        {"data": {"kind": "text", "path": "texts", "tokenizer": "tokenizer.json"}},
        "data",
        meshpar.Text(path="texts", tokenizer=meshpar.TokenizerFile(path="tokenizer.json")),
    ),
    "a kind among others": (
        {"parallel": {"pipeline": {"kind": "1f1b", "num_microbatches": 4, "cut": [1, 2]}}},
        "parallel",
        meshpar.Parallel(pipeline=meshpar.OneFOneB(num_microbatches=4, cut=(1, 2))),
    ),
    "a text for a path": ({"init": {"from_hf": "a/b"}}, "init", meshpar.Init(from_hf=Path("a/b"))),
    "an integer for a number": ({"optim": {"kind": "sgd", "lr": 1}}, "optim", meshpar.SGD(lr=1.0)),
}


@pytest.mark.parametrize("case", SHORT)
def test_plain_data_mean_in_python_what_they_mean_in_a_file(case, tmp_path):
    keys, field, meant = SHORT[case]
    run = Run(**PLAIN | keys)
    assert getattr(run, field) == meant
    assert run == in_a_file(tmp_path, keys) == Run.model_validate(PLAIN | keys)
    (tmp_path / "again.yaml").write_text(to_yaml(run))
    assert run == load(Run, tmp_path / "again.yaml")
    assert run == Run.model_validate_json(run.model_dump_json())
    assert run == Run.model_validate(run.model_dump()) == Run(**run.model_dump(mode="json"))


def test_tuples_paths_and_numpy_numbers_are_plain_data_too(tmp_path):
    run = Run(**PLAIN | {"num_steps": np.int64(3), "run_dir": tmp_path}, loggers=("wandb",))
    assert (type(run.num_steps), run.run_dir, run.loggers) == (int, tmp_path, (meshpar.WandB(),))
    assert meshpar.AdamW(lr=np.float32(0.5)).lr == 0.5
    assert meshpar.Text(path=tmp_path).path == str(tmp_path)


def test_a_nested_config_keeps_its_class():
    class OwnModel(meshpar.Llama):
        """A user's own."""

    model = OwnModel(**PLAIN["model"])
    assert Run(**PLAIN | {"model": model}).model is model


def test_a_copy_with_changes_keeps_the_rest():
    run = Run(**PLAIN)
    copy = run.model_copy(update={"num_steps": 5})
    assert (copy.num_steps, copy.optim, run.num_steps) == (5, run.optim, 3)


WRONG = {
    "a synonym": ({"mesh": {"tp": 2}}, ["mesh.tp", "unknown key", "did you mean mesh.tensor?"]),
    "a slip": ({"mesh": {"fsd": 2}}, ["mesh.fsd", "unknown key", "did you mean mesh.fsdp?"]),
    "a key of another section": ({"learning_rate": 1}, ["learning_rate", "unknown key", "did you mean optim.lr?"]),
    "a bound": ({"optim": {"kind": "adamw", "lr": -1}}, ["optim.lr", "must be greater than 0.0, got -1"]),
    "a text for an integer": ({"num_steps": "3"}, ["num_steps", "expected an integer, got '3'"]),
    "a number with a point": ({"num_steps": 3.0}, ["num_steps", "expected an integer, got 3.0"]),
    "a truth for an integer": ({"mesh": {"data": True}}, ["mesh.data", "expected an integer, got True"]),
    "a text for a number": ({"optim": {"kind": "sgd", "lr": "1"}}, ["optim.lr", "expected a number, got '1'"]),
    "a number for a path": ({"run_dir": 3}, ["run_dir", "expected a path, got 3"]),
    "a text for a list": ({"freeze": "blocks.**"}, ["freeze", "expected a list, got 'blocks.**'"]),
    "a text for a rule": ({"rules": {"embed": "fsdp"}}, ["rules.embed", "expected a list, got 'fsdp'"]),
    "a text for a section": (
        {"mesh": "fsdp"},
        [
            "mesh",
            "expected a mapping, got 'fsdp'",
            "{replica: ..., ...}; its keys are replica, data, fsdp, pipe, expert, context, tensor, dcn",
        ],
    ),
    "a preset": (
        {"rules": "fsd"},
        [
            "rules.preset",
            f"no preset is called 'fsd'; did you mean fsdp? There are {', '.join(PRESETS)}",
        ],
    ),
    "a kind": (
        {"optim": {"kind": "adam", "lr": 1}},
        ["optim", "no kind is called 'adam'", "did you mean adamw? There are adamw, lion, sgd, adafactor, muon"],
    ),
    "a kind in short": (
        {"parallel": {"gradient_reduction": {"across": "int9"}}},
        [
            "parallel.gradient_reduction.across",
            "no kind is called 'int9'",
            "did you mean int8? There are exact, bf16, int8, fp8, onebit, powersgd",
        ],
    ),
    "a kind in a list": (
        {"loggers": ["tensorboard", "wand"]},
        [
            "loggers.1",
            "no kind is called 'wand'",
            "did you mean wandb? There are tensorboard, wandb, mlflow, prometheus",
        ],
    ),
    "a list for a size": (
        {"contract": {"peak_bytes": [1]}},
        ["contract.peak_bytes", "expected a string or an integer, got [1]"],
    ),
    "a list for a size in a mapping": (
        {"contract": {"bytes_per_axis": {"data": [1]}}},
        ["contract.bytes_per_axis.data", "expected a string or an integer, got [1]"],
    ),
    "a word for a number": (
        {"model": PLAIN["model"] | {"unroll": "most"}},
        ["model.unroll", "expected 'auto' or 'all' or an integer, got 'most'"],
    ),
    "a value in short": ({"checkpoints": "often"}, ["checkpoints.every", "expected an integer, got 'often'"]),
    "a file in short": (
        {"data": {"kind": "text", "path": "a", "tokenizer": 3}},
        ["data.tokenizer.path", "expected a string, got 3"],
    ),
    "no kind": ({"optim": {"lr": 1}}, ["optim", "has no kind", "kind: adamw or lion or sgd or adafactor or muon"]),
    "two keys": (
        {"early_stopping": {"patience": 3}},
        ["Run", "early_stopping needs evaluations: set eval_every, the steps between them"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_python_and_files_raise_the_same_errors(case, tmp_path):
    keys, (where, *lines) = WRONG[case]
    with pytest.raises(ConfigError) as in_python:
        Run(**PLAIN | keys)
    assert str(in_python.value) == f"1 problem in Run:\n  {where}{INDENTED}{INDENTED.join(lines)}"
    assert in_python.value.__cause__ is in_python.value.__context__ is None, "the user would read pydantic's error too"
    with pytest.raises(ConfigError) as of_file:
        in_a_file(tmp_path, keys)
    problem = re.sub(r" \(\S+:\d+\)$", "", str(of_file.value), flags=re.M).partition("\n")[2]
    assert problem.replace("  the file\n", "  Run\n") == str(in_python.value).partition("\n")[2]


def test_all_problems_are_reported_at_once_including_those_in_sections():
    with pytest.raises(ConfigError) as refused:
        Run(**PLAIN | {"num_steps": 0, "optim": {"kind": "adamw", "lr": -1, "beta1": 0.9}}, mesh={"fsd": 2}, freeze=[3])
    wheres = re.findall(r"^  (\S+)$", str(refused.value), re.M)
    assert sorted(wheres) == ["freeze.0.paths", "mesh.fsd", "num_steps", "optim.beta1", "optim.lr"]


def test_a_config_alone_names_its_own_keys():
    with pytest.raises(ConfigError, match=r"in MeshLayout:\n  fsd\n    unknown key\n    did you mean fsdp\?$"):
        meshpar.MeshLayout(fsd=2)
    with pytest.raises(ConfigError, match=r"^1 problem in AdamW:\n  lr\n    must be greater than 0.0, got -1$"):
        meshpar.AdamW(lr=-1)
    with pytest.raises(ConfigError, match="must be finite, got nan"):
        meshpar.AdamW(lr=float("nan"))


@pytest.mark.parametrize("case", WRONG)
def test_pydantics_entrances_raise_the_error_of_the_constructor(case):
    keys, _ = WRONG[case]
    with pytest.raises(ConfigError) as in_python:
        Run(**PLAIN | keys)
    with pytest.raises(ConfigError) as of_data:
        Run.model_validate(PLAIN | keys)
    with pytest.raises(ConfigError) as of_json:
        Run.model_validate_json(json.dumps(PLAIN | keys))
    assert str(of_data.value) == str(in_python.value)
    # Where JSON has no path, pydantic expects a string.
    assert str(of_json.value).replace("a string", "a path") == str(in_python.value).replace("a string", "a path")
    assert of_data.value.__cause__ is of_data.value.__context__ is None


def test_text_that_is_not_json_is_a_config_error():
    with pytest.raises(ConfigError, match=r"^1 problem in Run:\n  Run\n    Invalid JSON: EOF while parsing"):
        Run.model_validate_json("{")


def test_control_a_type_adapter_raises_pydantics_own_error():
    with pytest.raises(pydantic.ValidationError):
        pydantic.TypeAdapter(Run).validate_python(PLAIN | {"num_steps": 0})


def test_configs_without_a_type_error_are_accepted_and_those_with_one_are_refused():
    assert checked_types.in_short() == checked_types.in_full()
    assert all(isinstance(config, Config) for config in checked_types.accepted())
    assert type(checked_types.sections_are_read_as_configs(checked_types.in_short())[0]) is meshpar.Retention
    for construct in checked_types.refused():
        with pytest.raises(ConfigError):
            construct()


# What the command line takes, Python takes ---------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path) -> str:
    """The path of a small config whose run is in a new folder."""
    (tmp_path / "config.yaml").write_text(CONFIG + f"run_dir: {tmp_path / 'run'}\n")
    return str(tmp_path / "config.yaml")


def test_a_verb_takes_the_path_of_a_config(path, monkeypatch):
    """Nothing is compiled: `inspect` and `verify` end when they have read the config."""
    run = meshpar.load(path)
    monkeypatch.setattr(import_module(meshpar.inspect.__module__), "_inspect_run", lambda given, *more: given)
    monkeypatch.setattr(import_module(meshpar.verify.__module__), "shrink", _end)
    for as_type in (str, Path):
        config = as_type(path)
        assert str(meshpar.explain(config)) == str(meshpar.explain(run))
        assert meshpar.inspect(config) == run
        with pytest.raises(_Ended) as ended:
            meshpar.verify(config)
        assert ended.value.args == (run,)
    assert str(meshpar.plan(path, "h100:1x1")) == str(meshpar.plan(run, "h100:1x1"))


class _Ended(Exception):
    """A verb was ended, with what it was given."""


def _end(given):
    raise _Ended(given)


def test_fit_takes_the_path_of_a_config(path, tmp_path):
    assert meshpar.fit(path, json=True).step == 2
    assert meshpar.Checkpoints(tmp_path / "run").latest() == 2  # the folder of the run
    assert meshpar.Checkpoints(tmp_path / "run" / "checkpoints").latest() == 2
    assert not (tmp_path / "run" / "2").exists()


@pytest.mark.parametrize("verb", [meshpar.explain, meshpar.inspect, meshpar.fit, meshpar.verify])
def test_a_verb_says_what_it_cannot_read(verb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read"):
        verb("none.yaml")


@pytest.mark.parametrize("verb", [meshpar.explain, meshpar.fit, meshpar.verify])
def test_a_verb_says_what_is_no_run(verb):
    with pytest.raises(ConfigError, match="expected a Run or the path of a config file, not dict"):
        verb(PLAIN)


def test_one_override_needs_no_list(path):
    assert meshpar.load(path, "mesh.fsdp=4") == meshpar.load(path, ["mesh.fsdp=4"])


ROWS = {"x": jnp.ones((8, 4)), "y": jnp.ones(8)}


def linear(**given) -> meshpar.Training:
    def loss(params, batch, key):
        return jnp.square(batch["x"] @ params["w"] - batch["y"]).mean()

    def init(key):
        return {"w": jax.random.normal(key, (4,))}

    return meshpar.training(init, loss, optax.sgd(0.1), ROWS, dims={"w": ("embed",)}, **given)


@pytest.mark.parametrize(
    "mesh", ["data=2 fsdp=4", "data=2,fsdp=4", "mesh.data=2, mesh.fsdp=-1", {"data": 2, "fsdp": 4}]
)
@pytest.mark.parametrize("rules", ["fsdp", ["fsdp"], {"preset": "fsdp"}])
def test_a_training_takes_sizes_and_presets_as_the_command_line_does(mesh, rules):
    made = linear(mesh=mesh, rules=rules)
    layout = meshpar.MeshLayout(data=2, fsdp=4)
    assert made.ctx == linear(mesh=layout, rules=meshpar.AxisRules(preset="fsdp")).ctx
    assert made.placement.params["w"].pspec == jax.P("fsdp")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mesh": "dta=8", "rules": "fsdp"}, r"1 problem in mesh 'dta=8':\n  dta .*\n.*\n *did you mean data\?"),
        ({"mesh": "data", "rules": "fsdp"}, r"in mesh 'data':\n  data "),
        ({"mesh": {"dta": 8}, "rules": "fsdp"}, r"did you mean data\?"),
        ({"mesh": "data=8", "rules": "fsdb"}, r"no preset is called 'fsdb'; did you mean fsdp\?"),
    ],
)
def test_wrong_sizes_or_presets_of_a_training_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        linear(**given)


@pytest.mark.parametrize(
    "dims", [(("batch", "embed"),), ("batch",), (["batch", "embed"],), ("batch", None), ("batch", "")]
)
def test_constrain_is_told_its_dims_in_the_same_way_everywhere(dims):
    """Outside a training too, where there is no mesh."""
    with pytest.raises(
        ShardingError, match=r"the array has 2 dims, \(4, 8\); give a name for each dim, as in constrain"
    ):
        inspect.unwrap(meshpar.constrain)(jnp.ones((4, 8)), *dims)  # without the tests' own check of types


def test_help_lists_the_fields_of_a_config_and_nothing_of_pydantics():
    shown = pydoc.plain(pydoc.render_doc(Run))
    for field in Run.model_fields:
        assert re.search(rf"^ \|    {field} (=|\(required\))", shown, re.MULTILINE), field
    assert " |    num_microbatches = 1\n |        Equal parts of a batch that are computed one after another" in shown
    assert "__pydantic" not in shown
    assert "Fields:" not in json.dumps(schema(Run))
