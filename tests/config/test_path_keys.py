"""Each key that takes a path takes a local one, says what it is relative to, and names what was likely meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshpar import Run, checkpoints, fit
from meshpar.checkpoint.saved import find
from meshpar.config import schema
from meshpar.config.annotations import is_path, may_be_stored, reachable
from meshpar.errors import CheckpointError, ConfigError
from meshpar.federated import Federated
from meshpar.regular_files import stored
from tests.config.keys import PLAIN, Key, text_keys
from tests.pictures import pictures, write_folders
from tests.sources import write_tokenizer

PATHS = {
    str(key): key for key in text_keys() if Path in (key.annotation, *key.metadata) or "Path" in str(key.annotation)
}
REMOTE = (
    "s3://bucket/x",
    "gs://bucket/x",
    "hf://datasets/me/x",
    "http://host/x",
    "https://host/x",
    "file:///x",
    "az://a/b",
)
CLASSIFIER = """
from flax import linen


class Classifier(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(x.mean((1, 2)))
"""
WRITTEN = ("run_dir", "cache")
"""What is made if it is missing."""


def test_the_keys_are_those_of_the_schema():
    names = {name.partition(" of ")[0].rpartition(".")[2] for name in PATHS}
    assert names == {"run_dir", "path", "held_out_path", "cache", "teacher", "from_checkpoint", "from_hf", "adapter"}
    assert len(PATHS) >= 19


def test_each_key_says_what_it_is_relative_to():
    found = {}
    for root in (Run, Federated):
        described = schema(root)
        for model in reachable(root):
            about = described["$defs"].get(model.__name__, described)
            properties = about.get("properties") or about["anyOf"][0]["properties"]
            for name in (name for name, field in model.model_fields.items() if is_path(field)):
                found[f"{model.__name__}.{name}"] = " ".join(properties[name]["description"].split())
    assert len(found) >= 14
    assert [key for key, text in found.items() if "elative to the working directory" not in text] == []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", PATHS)
def test_a_remote_address_is_refused_by_name_before_anything_runs(folder, command, name):
    """Data may be in an object store: tests/unit/test_store.py."""
    key = PATHS[name]
    for address in [one for one in REMOTE if not (may_be_stored(key.annotation, key.metadata) and stored(one))]:
        Path("config.yaml").write_text(json.dumps(key.data(address)))
        said = command("train", "config.yaml")
        assert said.code == 2
        section = ".".join(map(str, key.at))
        assert section in said.err
        assert f"{address.replace('///', '//')} is a remote address, and only local paths" in said.err
        assert [path.name for path in folder.iterdir()] == ["config.yaml"]
        with pytest.raises(ConfigError, match="remote address"):
            Run(**key.data(address))


def _sections(data: Any) -> list[dict[str, Any]]:
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return [*([data] if isinstance(data, dict) else []), *(found for part in inner for found in _sections(part))]


def near_name(key: Key, folder: Path) -> str:
    """A path that is missing; one that is spelt nearly the same exists."""
    (folder / "corpora" / "english.d").mkdir(parents=True, exist_ok=True)
    return "corpora/englsh.d"


@pytest.mark.parametrize("name", [name for name, key in PATHS.items() if key.name not in WRITTEN])
def test_a_missing_path_names_where_it_was_looked_for_and_the_nearest_name(folder, command, name):
    key = PATHS[name]
    data = key.data(near_name(key, folder))
    if "tokenizer" in key.at:  # the data are there, and the tokenizer is not
        (folder / "x").mkdir()
        (folder / "x" / "a.npy").write_text("a")
        if data["data"].get("kind") == "none":  # a converted model, without data so far
            data["data"] |= {"kind": "text", "path": "x"}
        for part in _sections(data["data"]):
            part |= {"glob": "*"} if "path" in part and "tokenizer" in part else {}
    if data["data"]["kind"] == "images":
        module = f"classifier_of_{key.name}"  # a process has one module of a name
        (folder / f"{module}.py").write_text(CLASSIFIER)
        data |= {"model": {"kind": "import", "target": f"{module}:Classifier"}, "loss": "classify"}
        if key.name != "path":
            data["data"]["path"] = str(write_folders(folder / "pictures", pictures()))
    if key.name == "adapter":
        data["init"]["from_hf"] = str(folder)
    if key.at[0] == "parallel":
        data |= {"rules": ["pipeline"], "mesh": {"data": 4, "pipe": 2}, "model": data["model"] | {"num_layers": 2}}
    for part in _sections(data["data"]):
        if part.get("kind") == "numpy" and "tokenizer" not in key.at:
            part["tokenizer"] = {"kind": "ids", "vocab_size": 9, "bos": 0}
        if part.get("kind") in ("chat", "preferences", "prompts") and "tokenizer" not in key.at:
            part["tokenizer"] = write_tokenizer(folder / "tokenizer.json").path
            data["model"] = data["model"] | {"vocab_size": 300}
            data |= {"loss": {"kind": "dpo"}} if part["kind"] == "preferences" else {}
            if part["kind"] == "prompts":
                (folder / "rewards_of_paths.py").write_text(
                    "def of(answers, lines):\n    return [0.0 for _ in answers]\n"
                )
                data |= {"loss": {"kind": "grpo", "reward": "rewards_of_paths:of"}}
    Path("config.yaml").write_text(json.dumps(data))
    said = command("train", "config.yaml", "loggers=[]")
    assert said.code == 2, said.err
    assert "englsh.d" in said.err
    assert str(folder) in said.err
    assert "did you mean" in said.err, said.err
    assert "corpora/english.d?" in said.err


def test_a_missing_config_is_named_with_its_folder(folder, command):
    (folder / "quickstart.yaml").write_text(json.dumps(PLAIN))
    said = command("train", "quickstrat.yaml")
    assert said.code == 2
    assert said.err.splitlines() == [
        "meshpar: quickstrat.yaml cannot be read: No such file or directory",
        f"  it is relative to the working directory, {folder}; did you mean quickstart.yaml?",
    ]


def test_a_name_of_the_hub_is_not_downloaded(folder, command):
    Path("config.yaml").write_text(json.dumps(PLAIN))
    said = command("train", "config.yaml", "init={from_hf: meta-llama/Llama-3.1-8B}")
    assert said.code == 2
    assert "init.from_hf: there is no folder meta-llama/Llama-3.1-8B" in said.err
    assert "nothing is downloaded: `hf download meta-llama/Llama-3.1-8B --local-dir FOLDER`" in said.err


@pytest.mark.parametrize(
    "words",
    [
        ("train", "s3://b/c.yaml"), ("train", "config.yaml", "--profile=gs://b/p"), ("watch", "s3://b/run"),
        ("inspect", "config.yaml", "--html", "s3://b/a.html"), ("convert", "config.yaml", "--to-hf=hf://me/model"),
        ("checkpoint", "ls", "http://b/run"), ("explain", "config.yaml", "--svg=s3://b/a.svg"),
        ("bench", "collectives", "--plot=s3://b/a.svg"), ("convert", "s3://b/run", "--from-hf=hf"),
        ("launch", "--processes=2", "--logs=s3://b/logs", "--", "train", "config.yaml"),
    ],
)  # fmt: skip
def test_a_remote_address_on_the_command_line_is_refused(folder, command, words):
    Path("config.yaml").write_text(json.dumps(PLAIN))
    said = command(*words)
    assert said.code == 2
    assert "is a remote address, and only local paths are read and written" in said.err
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]


def test_python_takes_only_local_paths_too(folder):
    run = Run(**PLAIN)
    with pytest.raises(CheckpointError, match="gs://b/run is a remote address"), checkpoints("gs://b/run"):
        pass
    with pytest.raises(ConfigError, match="s3://b/profile is a remote address"):
        fit(run, profile="s3://b/profile")
    with pytest.raises(CheckpointError, match="http://b/run is a remote address"):
        find(Path("http://b/run"))
    assert list(folder.iterdir()) == []
