"""`--version`, `env` and completion; and the messages where JAX finds no device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from meshpar.cli.env import EXTRAS
from meshpar.errors import printable

MAIN = [sys.executable, "-c", "from meshpar.cli import main; main()"]
CONFIG = """\
model: {kind: llama, num_layers: 2, hidden_size: 16, num_heads: 2, intermediate_size: 32, vocab_size: 64}
data: {kind: synthetic, vocab_size: 64, batch_size: 8, seq_len: 16}
optim: {kind: adamw, lr: 1e-2}
rules: [replicated]
num_steps: 2
run_dir: run
"""


def in_process(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs meshpar in a process of its own, in which JAX has not started."""
    return subprocess.run([*MAIN, *words], env=os.environ | environment, capture_output=True, text=True, timeout=120)


def test_the_version_is_printed(command):
    assert command("--version") == (0, f"meshpar {metadata.version('meshpar')}\n", "")


def test_env_says_versions_devices_and_variables_and_hides_secrets(command, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_CHECKS", "\x1b[31m1")
    monkeypatch.setenv("SLURM_JWT_TOKEN", "hunter2")
    monkeypatch.setenv("MY_OWN", "unrelated")
    code, out, err = command("env", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["versions"]["jax"] == metadata.version("jax")
    assert found["devices"] == {"platform": "cpu", "kind": "cpu", "count": 8, "processes": 1}
    assert found["variables"]["SLURM_JWT_TOKEN"] == "set, and not shown"
    assert "MY_OWN" not in found["variables"]
    out = command("env").out
    assert "8 cpu (cpu), processes: 1" in out
    assert "hunter2" not in out
    assert "\\x1b[31m1" in out
    assert "\x1b" not in out


def test_env_knows_every_extra_for_users():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {*EXTRAS, "dev", "docs"} == {*project["optional-dependencies"]}


def test_env_works_where_jax_cannot_start():
    done = in_process("env", "--json", JAX_PLATFORMS="cuda")
    assert done.returncode == 0, done.stderr
    assert "error" in json.loads(done.stdout)["devices"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("platform", ["cuda", "tpu", "abacus"])
def test_a_platform_without_a_device_is_reported_in_one_message(platform, tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    done = in_process("inspect", str(tmp_path / "config.yaml"), JAX_PLATFORMS=platform)
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert lines[-3] == f"meshpar: JAX cannot start the backend that JAX_PLATFORMS={platform} names:"
    assert lines[-1] == "  unset JAX_PLATFORMS, or set JAX_PLATFORMS=cpu; `meshpar env` shows what JAX finds"
    assert "Traceback" not in done.stderr


def test_control_another_error_of_the_runtime_is_no_missing_backend(command, monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("the backend of this test is fine")

    monkeypatch.setattr("meshpar.experiment.config.load", broken)
    with pytest.raises(RuntimeError, match="is fine"):
        command("explain", "config.yaml")


def test_completion_can_be_shown(command, monkeypatch):
    monkeypatch.setenv("SHELL", "/bin/bash")
    assert "--show-completion" in command("--help").out


def test_an_unknown_verb_or_option_is_reported_before_jax_is_imported():
    code = "import sys; from meshpar.cli import main\ntry: main()\nfinally: print('jax' in sys.modules)"
    for words in (["explian"], ["--vresion"], ["explain", "--devcies", "8"]):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (2, "False\n")


HOSTILE = "\x1b]0;owned\x07"


@pytest.mark.parametrize(
    "written",
    [
        f'{CONFIG}"\\e]0;owned\\a": 1\n',
        f'{CONFIG}mesh: {{"\\e]0;owned\\a": 1}}\n',
        CONFIG.replace("kind: llama", 'kind: "\\e]0;owned\\a"'),
        CONFIG.replace("[replicated]", '["\\e]0;owned\\a"]'),
        CONFIG.replace("num_steps: 2", 'num_steps: "\\e]0;owned\\a"'),
        f'extends: "../\\e]0;owned\\a"\n{CONFIG}',
        f'extends: "\\e]0;owned\\a"\n{CONFIG}',
    ],
)
def test_control_characters_are_escaped_in_messages(written, command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(written)
    code, out, err = command("explain", "config.yaml")
    assert (code, out) == (2, "")
    assert "owned" in err
    assert "\x1b" not in err
    assert "\x07" not in err


def test_a_key_cannot_write_lines_of_its_own(command, tmp_path):
    (tmp_path / "config.yaml").write_text(f'{CONFIG}"a\\n  mesh": 1\n')
    assert "'a\\n  mesh' contains the control character \\n" in command("explain", tmp_path / "config.yaml").err


def test_printable_text_is_left_as_it_is():
    assert printable("größe 模型 🦙\n\tx") == "größe 模型 🦙\n\tx"
    assert printable("\u202e\x9b\ud800") == "\\u202e\\x9b\\ud800"
