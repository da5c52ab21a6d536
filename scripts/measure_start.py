"""Measures the CPU seconds up to the first training step: of `meshpar train`, and of a script without a framework.

Each runs in its own process, which is killed at its first step, so compiling an evaluation and saving do not count.
User and system seconds of all threads are counted, because other programs use the cores at the same time. Python's
bytecode is on disk, as after an installation.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "configs" / "quickstart.yaml"
FIRST = '"kind": "train"'


def cold_over_bare(num_rounds: int = 5) -> dict[str, Any]:
    """`meshpar train` with an empty cache, over the bare script without a cache."""
    _write_bytecode()
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(num_rounds):
        theirs.append(_until_first_step([sys.executable, str(HERE / "measure_start.py")]))
        with tempfile.TemporaryDirectory() as folder:
            ours.append(_train(folder))
    return _ratio(ours, theirs)


def warm_over_cold(num_rounds: int = 5) -> dict[str, Any]:
    """The second `meshpar train` over the first, which filled the cache."""
    _write_bytecode()
    cold: list[float] = []
    warm: list[float] = []
    for _ in range(num_rounds):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(_train(folder))
            warm.append(_train(folder))
    return _ratio(warm, cold)


def bare() -> None:
    """The quickstart's first step, compiled by `jax.jit` and nothing else."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    import numpy as np
    import optax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import handwritten

    model = SimpleNamespace(
        num_layers=4, hidden_size=64, num_heads=8, kv_heads=8, head_size=8, intermediate_size=160, vocab_size=257,
        padded_vocab=288, remat=SimpleNamespace(policy="none"),
    )  # fmt: skip
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    tokens = np.random.default_rng(0).integers(0, 256, (32, 129), dtype=np.int32)
    arrays = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.tile(np.arange(128, dtype=np.int32), (32, 1)),
        "segments": np.zeros((32, 128), np.int32),
    }
    sharding = NamedSharding(mesh, PartitionSpec(handwritten.BATCH))
    batch = {name: jax.device_put(x, sharding) for name, x in arrays.items()}
    params = handwritten.init(model, mesh)
    rate = optax.warmup_cosine_decay_schedule(0.0, 6e-3, 30, 300)
    step, opt_state = handwritten.compile_step(model, mesh, params, batch, rate)
    _, _, loss = step(params, opt_state, batch)
    print(FIRST, float(loss), flush=True)


def _write_bytecode() -> None:
    with tempfile.TemporaryDirectory() as folder:
        _train(folder)


def _train(cache_home: str) -> float:
    main = "from meshpar.cli import main; main()"
    words = ["train", str(QUICKSTART), f"run_dir={cache_home}/run", "--json"]
    shutil.rmtree(f"{cache_home}/run", ignore_errors=True)
    return _until_first_step([sys.executable, "-c", main, *words], XDG_CACHE_HOME=cache_home)


def _until_first_step(command: list[str], **environment: str) -> float:
    settings = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "true", "PYTHONDONTWRITEBYTECODE": ""}
    environment = os.environ | settings | environment
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        if not any(FIRST in line for line in child.stdout):
            raise SystemExit(f"{command} ended before its first step")
        # user and system time are the 14th and 15th field, and the second, a name in parentheses, may contain spaces
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        child.kill()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _ratio(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    ours_s = statistics.median(ours)
    theirs_s = statistics.median(theirs)
    return {"value": ours_s / theirs_s, "ours_s": ours_s, "theirs_s": theirs_s}


if __name__ == "__main__":
    bare()
