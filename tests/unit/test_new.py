"""A new project passes its own test, trains, and overwrites nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshpar import load
from meshpar.cli.new import FILES
from tests.docs.page import ROOT


def in_project(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in the project as a user would, but with flags that shorten XLA's compilation."""
    flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"}
    environment = os.environ | flags | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def project(command, monkeypatch, tmp_path) -> Path:
    monkeypatch.chdir(tmp_path)
    assert command("new", "first") == (0, "".join(f"first/{file}\n" for file in FILES), "")
    return tmp_path / "first"


def test_the_model_and_config_of_a_new_project_fit(project):
    done = in_project(project, "-c", "from meshpar.cli import main; main()", "explain", "config.yaml")
    assert done.returncode == 0, done.stderr
    assert "Block_1" in done.stdout


@pytest.mark.slow
def test_the_test_of_a_new_project_passes(project):
    passed = in_project(project, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert passed.returncode == 0, passed.stdout


@pytest.mark.slow
def test_control_the_test_of_a_new_project_fails_if_the_model_looks_ahead(project):
    model = project / "model.py"
    model.write_text(model.read_text().replace("nn.make_causal_mask(tokens)", "None"))
    failed = in_project(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "later_token")
    assert failed.returncode == 1


@pytest.mark.slow
def test_a_new_project_trains_from_its_config(project):
    done = in_project(
        project,
        "-c",
        "from meshpar.cli import main; main()",
        "train",
        "config.yaml",
        "num_steps=10",
        "optim.schedule.warmup_steps=2",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["lower_by"] > 0


def test_a_config_comes_with_those_that_it_extends(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert command("new", "--config", "configs/fsdp.yaml") == (0, "configs/fsdp.yaml\nconfigs/quickstart.yaml\n", "")
    assert load("configs/fsdp.yaml") == load(ROOT / "configs" / "fsdp.yaml")
    assert command("new", "--config", "fsdp").code == 0  # nothing to overwrite
    Path("configs/quickstart.yaml").write_text("mine\n")
    message = "meshpar: new: configs/quickstart.yaml already exists with other contents, and is not overwritten\n"
    assert command("new", "--config", "gspmd") == (2, "", message)
    assert not Path("configs/gspmd.yaml").exists()


def test_every_config_of_the_repository_can_be_copied(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    configs = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml"))
    for config in configs:
        assert command("new", "--config", config.removeprefix("configs/").removesuffix(".yaml")).code == 0
        assert Path(config).read_bytes() == (ROOT / config).read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "quikstart"], "new: there is no config quikstart; did you mean quickstart?"),
        (["--config", "../x"], "new: there is no config ../x; there are bloom-176b, data-parallel, "),
        (["first", "--config", "fsdp"], "new: name a folder for a project, as in `meshpar new mymodel`, or a config"),
        ([], "new: name a folder for a project"),
    ],
)
def test_a_wrong_name_of_a_config_is_refused(words, message, command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, err = command("new", *words)
    assert (code, out) == (2, "") and err.startswith(f"meshpar: {message}")
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_and_nothing_is_written_elsewhere(project, command):
    (project / "model.py").write_text("mine\n")
    message = "meshpar: new: first already exists, and is not overwritten\n"
    assert command("new", "first") == (2, "", message)
    assert (project / "model.py").read_text() == "mine\n"
    message = "meshpar: new: '../second' is not a valid name: use letters, digits, - and _, starting with a letter\n"
    assert command("new", "../second") == (2, "", message)
    assert sorted(path.name for path in project.parent.iterdir()) == ["first"]
