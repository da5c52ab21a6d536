"""Measures tokens/s and MFU of a llama in bfloat16 on one GPU: meshpar, a hand-written jit, and torch.compile.

    python scripts/bench_gpu.py [KEY=VALUE ...] [--steps 20] [--without torch]

The config is `configs/llama-350m.yaml`. The three run one after the other, each alone on the device. The times are
medians of steps, after three warm-up steps. torch uses fused attention without float32 scores; both jits compute all
scores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

from meshpar import load, prepare
from meshpar.mesh.hardware import chip_of
from meshpar.tree import flatten_with_paths

# By default, JAX reserves three quarters of the memory, which would leave too little for torch.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
CONFIG = Path(__file__).parent.parent / "configs" / "llama-350m.yaml"


def with_meshpar(prepared, batch):
    import jax

    step = prepared.compile_step()
    state = prepared.compile_init()()

    def once():
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)

    return once


def with_jit(prepared, batch):
    import jax
    import jax.numpy as jnp

    import handwritten

    params = handwritten.init(prepared.run.model, prepared.mesh)
    rate = prepared.run.optim.learning_rate(prepared.run.num_steps)
    step, opt_state = handwritten.compile_step(prepared.run.model, prepared.mesh, params, batch, rate, jnp.bfloat16)

    def once():
        nonlocal params, opt_state
        params, opt_state, loss = step(params, opt_state, batch)
        jax.block_until_ready(loss)

    return once


def with_torch(prepared, batch):
    from torch_decoder import make_step

    return make_step(prepared.run.model, *batch["tokens"].shape)


def measure(once, steps: int) -> float:
    """Median seconds of a step."""
    times = []
    for _ in range(steps + 3):
        start = time.perf_counter()
        once()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def main() -> None:
    import jax

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--without", nargs="*", default=[], choices=["meshpar", "jit", "torch"])
    arguments = parser.parse_args()
    prepared = prepare(load(CONFIG, arguments.overrides))
    rows = prepared.run.data.train(0)[0]
    batch = {name: jax.device_put(x, prepared.batch[name].sharding) for name, x in rows.items()}
    chip = chip_of(jax.devices()[0])
    tokens = rows["tokens"].size
    params = sum(s.size for path, s in flatten_with_paths(prepared.specs).items() if path != "embedding")
    flops = float(prepared.model_flops) / tokens
    for name, make in {"meshpar": with_meshpar, "jit": with_jit, "torch": with_torch}.items():
        if name not in arguments.without:
            rate = tokens / measure(make(prepared, batch), arguments.steps)
            mfu = rate * flops / chip.flops if chip else None
            print(json.dumps({"with": name, "tokens_per_s": round(rate), "mfu": mfu, "params": params}), flush=True)


if __name__ == "__main__":
    main()
