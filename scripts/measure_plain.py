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
import handwritten_pipeline
import measure

sys.path.append(str(Path(__file__).parents[1]))

from meshpar import AxisRules, Parallel, inspect, training
from tests.zoo import llama
from tests.zoo.parts import cross_entropy


def of_cpu_seconds() -> dict[str, Any]:
    """The largest ratio of CPU seconds in two layouts of eight devices, and all ratios of each."""
    # With 2 rows the temporaries are 31.7 and 32.3 MiB. Beyond 32 MiB, glibc returns memory to the system each step.
    found = {name: measure.in_process(f"measure_plain.ratios({name!r}, rows=3)") for name in ("data", "fsdp")}
    return {"value": max(row["cpu"] for row in found.values()), "layouts": found}


def of_stages() -> dict[str, Any]:
    """Plain over own in the stages of a pipeline, `pipe=4 data=2`, with 4 microbatches; and both over a GPipe scan."""
    found = measure.in_process("measure_plain.ratios_of_stages()")
    return {"value": found["cpu"], **found}


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


def ratios_of_stages(num_rounds: int = 9, num_microbatches: int = 4) -> dict[str, float]:
    """As `ratios`, in stages; also the CPU seconds of each over those of a hand-written GPipe scan, and bytes sent."""
    layout = compare.LAYOUTS["pipe_data"]
    pipeline = {"kind": "1f1b", "num_microbatches": num_microbatches}
    changes = f"parallel.pipeline={{kind: 1f1b, num_microbatches: {num_microbatches}}}"
    own = compare.prepared(layout, compare.ROWS * layout.num_devices, changes)
    whole = {key: np.array(x) for key, x in own.run.data.train(own.run.seed)[0].items()}
    batch = {key: whole[key] for key in ("tokens", "targets")}
    rules = AxisRules(preset=[layout.rules])
    plain = of_plain(own, batch, rules=rules, parallel=Parallel.model_validate({"pipeline": pipeline}))
    steps = {"plain": plain.compile_step(), "own": own.compile_step()}
    scan = _gpipe(own, {name: jax.device_put(x, own.batch[name].sharding) for name, x in whole.items()})
    programs = {"plain": _compiled(plain, batch)[0], "own": _compiled(own, whole)[0], "scan": scan}
    for program in programs.values():
        program()
    cpu = compare.medians(compare.interleaved(programs, num_rounds))["cpu_s"]
    inspected = {name: inspect(step.compiled, own.mesh) for name, step in steps.items()}
    sent = {name: sum(one.bytes_per_axis.values()) for name, one in inspected.items()}
    return {
        "cpu": cpu["plain"] / cpu["own"],
        "own over scan": cpu["own"] / cpu["scan"],
        "plain over scan": cpu["plain"] / cpu["scan"],
        "sent": sent["plain"] / sent["own"],
        "flops": inspected["plain"].flops / inspected["own"].flops,
        "temporaries": inspected["plain"].memory.temporaries / inspected["own"].memory.temporaries,
    }


def _gpipe(own: Any, placed: Any) -> Any:
    model, rate = own.run.model, own.run.optim.learning_rate(own.run.num_steps)
    params = handwritten_pipeline.init(model, own.mesh)
    step, opt_state = handwritten_pipeline.compile_step(
        model, own.mesh, params, placed, rate, own.run.parallel.pipeline.num_microbatches
    )

    def one(state: Any) -> tuple[Any, Any]:
        params, opt_state, loss = step(*state, placed)
        return (params, opt_state), loss

    return compare.stepping(one, (params, opt_state))


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
