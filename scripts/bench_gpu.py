"""Measures tokens/s and MFU of a llama in bfloat16 on one GPU.

    python scripts/bench_gpu.py [KEY=VALUE ...] [--steps 20] [--only meshpar jit]

The config is `configs/llama-350m.yaml`. It compares meshpar's llama (`meshpar`), the llama of `tests/zoo`, which is
plain Flax and knows of no mesh, in `meshpar.training` (`plain`), a hand-written jit with cuDNN's attention (`jit`) and
`torch.compile`, which has fused attention as well (`torch`). They run one after the other, each in a process of its
own. The times are medians of steps, after three warm-up steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from meshpar import load, prepare
from meshpar.mesh.hardware import chip_of
from meshpar.tree import flatten_with_paths

# By default, JAX reserves three quarters of the memory, which would leave too little for torch.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "llama-350m.yaml"
sys.path.append(str(ROOT))


def with_meshpar(prepared, batch):
    return stepping(prepared, batch)


def with_plain(prepared, batch):
    import jax.numpy as jnp

    import measure_plain

    batch = {name: batch[name] for name in ("tokens", "targets")}
    return stepping(measure_plain.of_plain(prepared, batch, compute_dtype=jnp.bfloat16, clip_norm=1.0), batch)


def stepping(run, batch):
    import jax

    step = run.compile_step()
    state = run.compile_init()()

    def once():
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)

    return once


def with_jit(prepared, batch):
    import jax
    import jax.numpy as jnp

    import handwritten

    model = prepared.run.model
    params = handwritten.init(model, prepared.mesh)
    rate = prepared.run.optim.learning_rate(prepared.run.num_steps)
    attend = handwritten.fused if jax.default_backend() == "gpu" else handwritten.scored
    loss = partial(
        handwritten.whole_loss, mesh=prepared.mesh, vocab_size=model.vocab_size, remat=model.remat.policy, attend=attend
    )
    step, opt_state = handwritten.compile_step(model, prepared.mesh, params, batch, rate, jnp.bfloat16, loss)

    def once():
        nonlocal params, opt_state
        params, opt_state, loss = step(params, opt_state, batch)
        jax.block_until_ready(loss)

    return once


def with_torch(prepared, batch):
    from torch_decoder import make_step

    return make_step(prepared.run.model, *batch["tokens"].shape)


PROGRAMS = {"meshpar": with_meshpar, "plain": with_plain, "jit": with_jit, "torch": with_torch}


def measure(once, steps: int) -> float:
    """Median seconds of a step."""
    times = []
    for _ in range(steps + 3):
        start = time.perf_counter()
        once()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def row(name: str, overrides: list[str], num_steps: int) -> dict[str, Any]:
    import jax

    prepared = prepare(load(CONFIG, overrides))
    rows = prepared.run.data.train(0)[0]
    batch = {name: jax.device_put(x, prepared.batch[name].sharding) for name, x in rows.items()}
    chip = chip_of(jax.devices()[0])
    tokens = rows["tokens"].size
    params = sum(s.size for path, s in flatten_with_paths(prepared.specs).items() if path != "embedding")
    flops = float(prepared.model_flops) / tokens
    rate = tokens / measure(PROGRAMS[name](prepared, batch), num_steps)
    mfu = round(rate * flops / chip.flops, 4) if chip else None
    return {"with": name, "tokens_per_s": round(rate), "mfu": mfu, "params": params}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="*", default=list(PROGRAMS), choices=list(PROGRAMS))
    arguments = parser.parse_args()
    if len(arguments.only) == 1:
        print(json.dumps(row(arguments.only[0], arguments.overrides, arguments.steps)), flush=True)
        return
    # A process keeps the memory of the device that it took.
    for name in arguments.only:
        words = [*arguments.overrides, "--steps", str(arguments.steps), "--only", name]
        subprocess.run([sys.executable, __file__, *words], check=False)


if __name__ == "__main__":
    main()
