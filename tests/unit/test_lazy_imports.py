"""A verb imports nothing that it does not use: a large package costs more time than a small program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache

import pytest

CONFIG = """\
model: {kind: llama, num_layers: 1, hidden_size: 8, num_heads: 2, intermediate_size: 8, vocab_size: 64}
data: {kind: synthetic, vocab_size: 64, batch_size: 8, seq_len: 8}
optim: {kind: adamw, lr: 1e-2}
num_steps: 1
run_dir: run
"""
PROBE = """
import json, sys
from meshpar.cli import main

try:
    main()
finally:
    print(json.dumps(sorted(name.partition(".")[0] for name in sys.modules)))
"""
FOREIGN = {
    "matplotlib", "mlflow", "pandas", "pyarrow", "qwix", "safetensors", "scipy", "sklearn", "tensorflow",
    "tokenizers", "torch", "transformers", "wandb",
}  # fmt: skip
"""Packages for models, data and services that the config of this test does not name. Flax imports IPython if it can."""
TRAINING = {"grain", "orbax", "tensorboardX"}
PAGES = {"jinja2"}
JAX = {"flax", "jax", "numpy", "optax"}
TRAIN = ("train", "config.yaml")
FORBIDDEN = {
    ("--help",): FOREIGN | TRAINING | PAGES | JAX | {"pydantic", "yaml"},
    ("--version",): FOREIGN | TRAINING | PAGES | JAX | {"pydantic", "rich", "yaml"},
    ("new", "project"): FOREIGN | TRAINING | PAGES | JAX | {"yaml"},
    ("schedule", "gpipe"): FOREIGN | TRAINING | PAGES | JAX,
    ("schema",): FOREIGN | TRAINING | PAGES,
    ("explain", "config.yaml"): FOREIGN | TRAINING | PAGES,
    ("inspect", "config.yaml"): FOREIGN | TRAINING | PAGES,
    TRAIN: FOREIGN | PAGES,
    ("checkpoint", "show", "run"): FOREIGN | TRAINING | PAGES | {"flax", "optax"},
    ("plot", "run"): FOREIGN - {"matplotlib", "pandas"} | TRAINING | PAGES | JAX - {"numpy"},
    ("env",): FOREIGN | TRAINING | PAGES | {"flax", "optax"},
}
"""Command -> packages that it must not import."""


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """What the process of a command has imported: the top-level names of all modules."""
    folder = tmp_path_factory.mktemp("imports")
    (folder / "config.yaml").write_text(CONFIG)

    @cache
    def names(*words: str) -> set[str]:
        if words[-1] == "run":
            names(*TRAIN)  # which writes what is read
        command = [sys.executable, "-c", PROBE, *words]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return set(json.loads(done.stdout.splitlines()[-1]))

    return names


@pytest.mark.sample(5)
@pytest.mark.parametrize("words", FORBIDDEN, ids=" ".join)
def test_a_verb_imports_only_what_it_uses(imported, words):
    assert not imported(*words) & FORBIDDEN[words]


def test_control_packages_that_a_verb_uses_are_seen(imported):
    assert imported(*TRAIN) >= TRAINING | JAX
    assert "matplotlib" in imported("plot", "run")


def test_tensorboard_leaves_torch_importable():
    """torch is hidden only while tensorboardX is imported."""
    pytest.importorskip("torch")
    code = "from meshpar.import_blocker import blocked\n"
    code += "with blocked('torch'):\n    from tensorboardX.event_file_writer import EventsWriter\n"
    code += "import sys; assert 'torch' not in sys.modules; import torch; torch.ones(1)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize(("word", "is_imported"), [("train", False), ("trian", True), ("--help", True)])
def test_only_the_verb_of_a_command_line_is_imported(word, is_imported):
    code = f"import sys; from meshpar import cli; cli.verbs({word!r}); assert 'meshpar.cli.train' in sys.modules\n"
    code += f"assert ('meshpar.cli.plan' in sys.modules) == {is_imported}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
