"""A pipeline over fsdp and tensor, whose collectives XLA:CPU must begin in one order on every device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import jax, numpy as np
import meshpar
from meshpar.experiment.prepare import prepare
from meshpar.parallel.pipeline import execute, layers

if "control" in sys.argv:
    execute.after = layers.after = lambda number, results: number
meshpar.simulate(8)
run = meshpar.Run(
    model={
        "kind": "llama", "num_layers": 2, "hidden_size": 32, "num_heads": 8, "intermediate_size": 96, "vocab_size": 8192
    },
    data={"kind": "synthetic", "vocab_size": 8192, "batch_size": 16, "seq_len": 64},
    optim={"kind": "adamw", "lr": 1e-3},
    mesh={"fsdp": 2, "pipe": 2, "tensor": 2},
    rules=["fsdp", "megatron_sp", "pipeline"],
    parallel={"pipeline": {"kind": "1f1b", "num_microbatches": 8}},
    num_steps=20,
    run_dir="unused",
)
prepared = prepare(run)
step = prepared.compile_step()
structs = prepared.on_prepared_states.placement.structs
state = step.prepare(jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), structs))
batch = {name: jax.device_put(x, prepared.batch[name].sharding) for name, x in run.data.train(run.seed)[0].items()}
for _ in range(run.num_steps):
    state, metrics = jax.block_until_ready(step(state, batch))
print(f"loss {float(metrics['loss']):.4f}")
"""
FLAGS = "--xla_cpu_collective_call_warn_stuck_timeout_seconds=1 --xla_cpu_collective_call_terminate_timeout_seconds=4"


def run(*words):
    environment = os.environ | {"XLA_FLAGS": FLAGS}
    program = [sys.executable, "-c", PROGRAM, *words]
    root = Path(__file__).parents[2]
    return subprocess.run(program, cwd=root, env=environment, capture_output=True, text=True, timeout=180)


@pytest.mark.slow
def test_a_large_vocabulary_does_not_hang_a_pipeline():
    """Its embedding is gathered in a conditional, beside gathers of the first layer that do not need it."""
    done = run()
    assert done.returncode == 0, done.stderr
    assert done.stdout == "loss 9.0109\n", "log(8192): parameters of zero have no gradients"


@pytest.mark.slow
def test_control_conditions_that_wait_for_nothing_hang():
    assert run("control").returncode < 0
