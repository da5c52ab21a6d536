"""The floors of pyproject.toml hold, and each contract breaks when a fault is planted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    """Runs import-linter on the package and pyproject.toml in `root`."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    environment = os.environ | {"PYTHONPATH": str(root), "COLUMNS": "200"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path):
    """A checkout in which faults can be planted."""
    shutil.copytree(ROOT / "meshpar", tmp_path / "meshpar", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_every_module_imports_only_from_below():
    linted = lint(ROOT)
    assert linted.returncode == 0, linted.stdout + linted.stderr


CIRCLE = "No room imports itself"
FAULTS = {
    "upwards": ("mesh/planted.py", "from meshpar.parallel import batch", "A module imports only"),
    "in a circle": ("mesh/planted.py", "from meshpar.sharding import rules", CIRCLE),
    "layers in an optimizer": ("optim/planted.py", "from meshpar.nn import rotary", "do not import each other"),
    "sideways": ("nn/planted.py", "from meshpar.train import loop", "A module imports only"),
    "in no layer": ("planted.py", "", "A module imports only"),
    "flax below nn": ("parallel/planted.py", "import flax", "no Flax"),
    "in no layer of interop": ("interop/planted.py", "", "In interop"),
    "train in a reader of files": ("interop/folder.py", "from meshpar.train import loop", "knows no training"),
    "orbax elsewhere": ("train/planted.py", "import orbax.checkpoint", "Orbax only in"),
    "grain elsewhere": ("train/planted.py", "import grain", "Grain only in"),
    "yaml elsewhere": ("models/planted.py", "import yaml", "YAML only in"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_import_breaks_its_contract(fault, copy):
    path, code, contract = FAULTS[fault]
    (copy / "meshpar" / path).write_text(code)
    linted = lint(copy)
    broken = [line for line in linted.stdout.splitlines() if " BROKEN" in line]
    assert linted.returncode == 1
    broken = [
        line for line in broken if CIRCLE not in line or contract == CIRCLE
    ]  # what goes up may close a circle, too
    assert len(broken) == 1 and contract in broken[0], linted.stdout
