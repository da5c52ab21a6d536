"""Why overlap is refused beside a pipeline: on CPUs a permute in a branch waits for devices that take another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import jax, jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

mesh = jax.make_mesh((2, 2), ("pipe", "tensor"), axis_types=(AxisType.Auto,) * 2)
SENT = {
    "permute": lambda x: lax.ppermute(x, "tensor", [(0, 1), (1, 0)]),
    "reduce_scatter": lambda x: lax.psum_scatter(x, "tensor", tiled=True),
}

def local(x):
    return lax.cond(lax.axis_index("pipe") == 0, lambda x: SENT["%s"](x).sum(), jnp.sum, x)[None]

spec = PartitionSpec(("pipe", "tensor"))
print(jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))(jnp.ones(8)))
"""
FLAGS = "--xla_cpu_collective_call_warn_stuck_timeout_seconds=1 --xla_cpu_collective_call_terminate_timeout_seconds=5"


def run(collective):
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "4", "XLA_FLAGS": FLAGS}
    program = [sys.executable, "-c", PROGRAM % collective]
    root = Path(__file__).parents[2]
    return subprocess.run(program, cwd=root, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_permute_in_a_branch_waits_for_devices_that_take_another():
    """When this fails, XLA no longer waits, and `REFUSED` in parallel/combinations.py can lose its rows."""
    done = run("permute")
    assert done.returncode < 0
    assert "collective permute" in done.stderr


@pytest.mark.slow
def test_a_reduce_scatter_waits_for_its_own_group_alone():
    assert run("reduce_scatter").stdout == "[2. 2. 2. 2.]\n"
