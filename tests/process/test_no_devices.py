"""`explain` and the tracing of a step look for no devices."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
from pathlib import Path
from jax._src import xla_bridge
from meshpar.experiment.actions import explain
from meshpar.experiment.prepare import prepare
from meshpar.experiment.config import Run, load

run = load(Path("configs/tensor.yaml"))
assert str(explain(run))
shared = {"mesh": {"context": 2}, "rules": "context", "parallel": {"context": "ring"}}
assert "ring" in str(explain(Run.model_validate(run.model_dump() | shared)))
forms = {platform: prepare(run, run.mesh.abstract(platform=platform)).traced_bytes for platform in ("cpu", "gpu")}
print(all(forms.values()), xla_bridge._backends)
"""


def test_explain_and_a_traced_step_start_no_backend():
    """JAX_PLATFORMS names GPUs, which do not exist here, so that JAX would fail if it looked for devices."""
    environment = os.environ | {"JAX_PLATFORMS": "cuda"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout.split()) == (0, ["True", "{}"]), ended.stderr
