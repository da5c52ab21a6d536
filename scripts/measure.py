"""The measurements of `bench_step.py`, in separate processes if they would influence each other."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import compare

HERE = Path(__file__).resolve().parent
NUM_PROCESSES = 3
"""A step's time depends on where the memory of its process lies: two processes with the same programs differ by 4 %."""


def step_ratios(layout: str, num_rounds: int = 9) -> dict[str, Any]:
    """The medians of `compare` in one layout. `NUM_PROCESSES` fresh processes share the rounds."""
    each = -(-num_rounds // NUM_PROCESSES)
    rounds = [one for _ in range(NUM_PROCESSES) for one in in_process(f"compare.compare({layout!r}, {each})")]
    return compare.medians(rounds) | {"scan_limit": compare.LAYOUTS[layout].scan_limit}


def python_microseconds() -> dict[str, Any]:
    return in_process("measure._python_microseconds()")


def import_ratio(num_rounds: int = 9) -> dict[str, Any]:
    """User and system seconds of each import in a fresh interpreter, interleaved."""
    bare = []
    ours = []
    for _ in range(num_rounds):
        bare.append(_cpu_s("import jax, jax.numpy, flax.nnx, optax"))
        ours.append(_cpu_s("import meshpar"))
    return _ratio(ours, bare)


def compile_ratio(num_rounds: int = 3) -> dict[str, Any]:
    """Compile seconds of the quickstart's step for 8 and for 512 simulated devices, with equal rows per device."""
    few = []
    many = []
    for _ in range(num_rounds):
        few.append(in_process("measure._compile_s(8)"))
        many.append(in_process("measure._compile_s(512)"))
    return _ratio(many, few)


def memory_ratio() -> dict[str, Any]:
    return in_process("measure._memory_ratio()")


def _python_microseconds(num_leaves: int = 400, num_calls: int = 300) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from meshpar.train.step import Step

    tree = {f"leaf_{i}": jnp.zeros(()) for i in range(num_leaves)}
    names = ("loss", "grad_norm", "tokens", "skipped", "lr")
    compiled = jax.jit(lambda state, batch: (state, dict.fromkeys(names, jnp.zeros(())))).lower(tree, {}).compile()
    step = Step(compiled, {})
    ours = []
    bare = []
    for i in range(num_calls):
        pair = [(step, ours), (compiled, bare)]
        for call, times in pair[:: 1 if i % 2 else -1]:  # the first of two calls takes longer
            start = time.perf_counter()
            call(tree, {})
            times.append(time.perf_counter() - start)
    extra = statistics.median(ours) - statistics.median(bare)
    return {"value": extra * 1e6, "ours_s": statistics.median(ours), "theirs_s": statistics.median(bare)}


def _compile_s(num_devices: int) -> float:
    from meshpar.experiment.prepare import prepare

    run = _quickstart(num_devices, f"mesh.data={num_devices // 4}", f"data.batch_size={num_devices * 4}")
    prepared = prepare(run.run, run.mesh)
    start = time.perf_counter()
    prepared.compile_step()
    return time.perf_counter() - start


def _memory_ratio() -> dict[str, Any]:
    """The growth of the peak resident set during init, over the bytes of the state."""
    import jax

    large = ["model.hidden_size=1024", "model.num_layers=8", "model.intermediate_size=2560"]
    init = _quickstart(8, *large).compile_init()
    before = int(_status("VmRSS")) * 1024
    Path("/proc/self/clear_refs").write_text("5")
    state = jax.block_until_ready(init())
    peak = int(_status("VmHWM")) * 1024 - before
    held = sum(s.data.nbytes for x in jax.tree.leaves(state) for s in x.addressable_shards)
    return {"value": peak / held, "peak_bytes": peak, "state_bytes": held}


def _quickstart(num_devices: int, *overrides: str) -> Any:
    from meshpar.experiment.config import load
    from meshpar.experiment.prepare import prepare
    from meshpar.mesh.process import simulate

    simulate(num_devices)
    return prepare(load(compare.QUICKSTART, list(overrides)))


def _ratio(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    ours_s = statistics.median(ours)
    theirs_s = statistics.median(theirs)
    return {"value": ours_s / theirs_s, "ours_s": ours_s, "theirs_s": theirs_s}


def _status(field: str) -> str:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(field))


def _cpu_s(code: str) -> float:
    before = os.times()
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def in_process(expression: str) -> Any:
    """Evaluates an expression of the modules beside this one in a fresh interpreter."""
    code = f"import json, compare, measure, measure_attention, measure_plain; print(json.dumps({expression}))"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE)}
    done = subprocess.run([sys.executable, "-c", code], check=True, env=environment, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])
