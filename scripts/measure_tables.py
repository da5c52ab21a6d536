"""Trains a table on 8 simulated devices, and measures the peak of the process's memory over the bytes of the shards.

python scripts/measure_tables.py 4        # 4 GiB
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar import MeshLayout, simulate, tables

WIDTH, PER_DEVICE, CAPACITY, STEPS = 64, 1024, 256, 5


def resident() -> int:
    """Bytes that the process holds now."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def measure(gib: float) -> dict[str, float]:
    simulate(8)
    num_rows = int(gib * 2**30) // (WIDTH * 4)
    optim = {"kind": "row_adagrad", "lr": 0.1}
    table = tables.Table(num_rows=num_rows, width=WIDTH, partition="hash", capacity=CAPACITY, optim=optim)
    run = tables.training(
        lambda key: (),
        lambda params, rows, batch: jnp.square(rows["only"] - 1).mean(),
        lambda batch: {"only": batch["ids"]},
        optax.identity(),
        {"ids": jax.ShapeDtypeStruct((8 * PER_DEVICE,), jnp.int32)},
        tables={"only": table},
        mesh=MeshLayout(data=8),
    )
    init = run.compile_init()
    step = run.compile_step()
    before = resident()
    began = time.process_time()
    state = jax.block_until_ready(init(jax.random.key(0)))
    init_s = time.process_time() - began
    rng = np.random.default_rng(0)
    batch = run.put({"ids": rng.integers(num_rows, size=8 * PER_DEVICE).astype("i4")})
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        run.check(metrics)
        losses.append(float(metrics.loss))
    shards = sum(x.nbytes for x in jax.tree.leaves(state))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "shards_gib": shards / 2**30,
        "peak_over_shards": (peak - before) / shards,
        "init_cpu_s": init_s,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


if __name__ == "__main__":
    print(json.dumps(measure(float(sys.argv[1]))))
