"""The peak memory of an import, measured by the kernel, against the bytes of the train state."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from meshpar.interop import architectures
from meshpar.interop.layout import decoder_layout
from meshpar.interop.safetensors import Written, write
from meshpar.models import Llama
from tests.interop.memory import SIZES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of 300 MB that is written in full, because the holes of a sparse file are not read from disk."""
    made = tmp_path_factory.mktemp("large")
    model = Llama(**SIZES)
    config = architectures.write(model)
    (made / "config.json").write_text(json.dumps(config))
    expected = decoder_layout(model, config["model_type"]).expected.items()
    dtype = np.dtype("float32")
    write(made / "model.safetensors", [Written(n, dtype, s, lambda s=s: np.full(s, 0.1, "f")) for n, s in expected])
    return made


def peak(folder, how):
    """(bytes of the state, bytes by which the process grew at most)"""
    command = [sys.executable, "-m", "tests.interop.memory", str(folder), how]
    environment = {"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return map(int, done.stdout.split())


def test_an_import_holds_little_more_than_the_state(folder):
    needed, held = peak(folder, "by part")
    assert needed > 300e6
    assert held < 1.3 * needed, (held, needed)


@pytest.mark.slow
def test_control_reading_all_before_placing_it_is_seen(folder):
    needed, held = peak(folder, "all at once")
    assert held > 1.7 * needed, (held, needed)
