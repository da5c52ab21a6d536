"""Compares a step of a plain Flax llama with that of `kind: llama` of the same size, interleaved in one process.

The model is `tests/zoo/llama.py`, in the style of Flax's examples, and knows nothing of meshpar.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import compare
import measure

sys.path.append(str(Path(__file__).parents[1]))

from meshpar import AxisRules, training
from tests.zoo import llama
from tests.zoo.parts import cross_entropy


def of_cpu_seconds() -> dict[str, Any]:
    """The largest ratio of CPU seconds in two layouts of eight devices, and all ratios of each."""
    # With 2 rows the temporaries are 31.7 and 32.3 MiB. Beyond 32 MiB, glibc returns memory to the system each step.
    found = {name: measure.in_process(f"measure_plain.ratios({name!r}, rows=3)") for name in ("data", "fsdp")}
    return {"value": max(row["cpu"] for row in found.values()), "layouts": found}


def of_temporaries() -> dict[str, Any]:
    """The ratio of temporary bytes on one device, for a row of 2,048 tokens."""
    found = measure.in_process("measure_plain.ratios('single', 1, 1, 2048)")
    return {"value": found["temporaries"], "single": found}


def ratios(name: str, num_rounds: int = 9, rows: int = compare.ROWS, seq_len: int = 256) -> dict[str, float]:
    """Ratios of CPU seconds, wall seconds and temporary bytes: plain over own.

    Args:
      rows: of each device.
    """
    layout = compare.LAYOUTS[name]
    own = compare.prepared(layout, rows * layout.num_devices, f"data.seq_len={seq_len}")
    batch = {key: np.array(x) for key, x in own.run.data.train(own.run.seed)[0].items() if key in ("tokens", "targets")}
    plain = of_plain(own, batch, rules=AxisRules(preset=[layout.rules]))
    found = {"plain": _compiled(plain, batch), "own": _compiled(own, own.run.data.train(own.run.seed)[0])}
    for program, _ in found.values():
        program()
    measured = compare.medians(compare.interleaved({name: one for name, (one, _) in found.items()}, num_rounds))
    temporaries = {name: bytes_ for name, (_, bytes_) in found.items()}
    return {
        "cpu": measured["cpu_s"]["plain"] / measured["cpu_s"]["own"],
        "wall": measured["wall_s"]["plain"] / measured["wall_s"]["own"],
        "temporaries": temporaries["plain"] / temporaries["own"],
    }


def of_plain(own: Any, batch: Any, **arguments: Any) -> Any:
    """The training of the plain llama, with the sizes and the mesh of our own."""
    _resize(own.run.model)
    jax.config.update("jax_numpy_dtype_promotion", "standard")  # as Flax's users have it
    arguments = {"rules": AxisRules(preset=["replicated"])} | arguments
    return training(
        lambda key: llama.Llama().init(key, jnp.ones((1, batch["tokens"].shape[1]), jnp.int32))["params"],
        lambda params, batch, key: cross_entropy(
            llama.Llama().apply({"params": params}, batch["tokens"]), batch["targets"]
        ),
        optax.adamw(1e-3), batch, mesh=own.mesh, batch_dims=dict.fromkeys(batch, ("batch", "seq")), **arguments,
    )  # fmt: skip


def _resize(model: Any) -> None:
    llama.WIDTH, llama.LAYERS, llama.VOCAB = model.hidden_size, model.num_layers, model.padded_vocab
    llama.HEADS, llama.KV_HEADS = model.num_heads, model.kv_heads
    llama.HEAD_DIM, llama.HIDDEN = model.hidden_size // model.num_heads, model.intermediate_size


def _compiled(run: Any, batch: Any) -> tuple[Any, int]:
    """A program that takes a step, and the bytes of its temporaries."""
    step = run.compile_step()
    placed = run.put(batch)

    def one(state: Any) -> tuple[Any, Any]:
        state, metrics = step(state, placed)
        return state, metrics["loss"]

    program = compare.stepping(one, step.prepare(run.compile_init()()))
    return program, step.compiled.memory_analysis().temp_size_in_bytes
