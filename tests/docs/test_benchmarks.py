"""No count of `docs/benchmarks.json` grows: bytes sent, FLOPs and temporaries of the quickstart's step."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import benchmarks
import compare_layouts
from tests.docs.page import ROOT, shell

IN_CI = "ZeRO-3 and tensor"
RECORDED = list(json.loads(benchmarks.FILE.read_text()).values())[-1]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == IN_CI else pytest.mark.slow) for n in compare_layouts.LAYOUTS]
)
def test_no_count_is_larger_than_in_the_last_release(name):
    """Compiled without the XLA flags of the tests, as for the file."""
    command = [sys.executable, ROOT / "scripts" / "benchmarks.py", "--compare", name]
    environment = shell() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr[-4000:]


def test_control_each_count_that_grows_is_named():
    more = {key: RECORDED["layouts"][IN_CI][key] + 1 for key in benchmarks.COUNTS}
    assert [line.split()[-4] for line in benchmarks.grown(IN_CI, more)] == list(benchmarks.COUNTS)
