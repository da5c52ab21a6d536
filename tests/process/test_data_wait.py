"""The quickstart does not wait for its data; `tests/unit/test_loop.py` shows that a wait is recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAIN = "from meshpar import cli; cli.main()"


@pytest.mark.slow
def test_the_quickstart_waits_under_two_percent_of_its_time(tmp_path: Path):
    arguments = ["train", str(ROOT / "configs" / "quickstart.yaml"), "--json", "num_steps=60", f"run_dir={tmp_path}"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, *arguments], env=environment, capture_output=True, text=True, check=True
    )
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["kind"] == "summary"
    assert summary["data_wait"] < 0.02
