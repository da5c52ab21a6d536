"""Times meshpar's step beside the hand-written ones in one layout, interleaved in one process."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

QUICKSTART = Path(__file__).resolve().parent.parent / "configs" / "quickstart.yaml"
MODEL = ("model.hidden_size=256", "model.intermediate_size=640", "data.seq_len=256", "optim.lr=1e-3")
ROWS = 2
"""Rows of 256 tokens per device."""
NUM_MICROBATCHES = 8
PIPELINE = f"parallel.pipeline={{kind: 1f1b, num_microbatches: {NUM_MICROBATCHES}}}"
ROUND_S = 1.0
"""How long a program runs in a round: a single step of 0.1 s is at the mercy of what else the machine does."""
TOLERANCE = 1e-4
"""The largest relative difference of a hand-written step's losses from meshpar's, for the same parameters."""


@dataclass(frozen=True)
class Layout:
    """A layout of the quickstart's llama.

    Args:
      mesh: axis -> size.
      rules: meshpar's presets.
      axes: the arguments of the hand-written `Axes`.
      scan_limit: the largest ratio to the hand-written scan; None if it is only reported, or there is no such scan.
      changes: further `key=value` of the config.
    """

    mesh: dict[str, int]
    rules: str
    axes: dict[str, Any]
    scan_limit: float | None = None
    changes: tuple[str, ...] = ()

    @property
    def num_devices(self) -> int:
        return int(np.prod(list(self.mesh.values())))


PER_TOKEN = 2
EXPERTS = (f"model.experts={{num: 8, per_token: {PER_TOKEN}, intermediate_size: 320}}",)
LAYOUTS = {
    "single": Layout({}, "replicated", {}),
    "data": Layout({"data": 8}, "replicated", {"batch": "data"}, 0.80),
    "fsdp": Layout({"fsdp": 8}, "fsdp", {"batch": "fsdp", "stored": True}, 0.80),
    "tensor": Layout({"tensor": 8}, "megatron", {"tensor": "tensor"}, 0.80),
    "tensor_sp": Layout({"tensor": 8}, "megatron_sp", {"tensor": "tensor", "sequence": True}),
    "data_tensor": Layout(
        {"data": 2, "tensor": 4}, "megatron_sp", {"batch": "data", "tensor": "tensor", "sequence": True}
    ),
    "pipe_data": Layout({"pipe": 4, "data": 2}, "pipeline", {"batch": "data", "stage": "pipe"}, 0.70),
    "experts": Layout({}, "replicated", {"per_token": PER_TOKEN}, changes=EXPERTS),
    "expert_data": Layout(
        {"data": 2, "expert": 4},
        "experts",
        {"batch": "data", "expert": "expert", "per_token": PER_TOKEN},
        changes=EXPERTS,
    ),
}


def compare(name: str, num_rounds: int) -> list[dict[str, list[float]]]:
    """Times rounds of steps, see `interleaved`, after a check that the hand-written step computes the same."""
    layout = LAYOUTS[name]
    run = prepared(layout, ROWS * layout.num_devices)
    batch = _with_documents(run.run.data.train(run.run.seed)[0])
    programs = _programs(layout, run, batch)
    _check_equal(name, [programs["meshpar"]() for _ in range(3)], [programs["by hand"]() for _ in range(3)])
    if "scan" in programs:
        programs["scan"]()
    return interleaved(programs, num_rounds)


def interleaved(programs: dict[str, Callable[[], float]], num_rounds: int) -> list[dict[str, list[float]]]:
    """Program -> [process CPU, wall] seconds of a step, for each round. The programs run in turn."""
    orders = list(itertools.permutations(programs))
    # A program's time depends on the pages and caches that the previous one left: each follows each of the others.
    return [
        {program: _seconds_of_a_step(programs[program]) for program in orders[i % len(orders)]}
        for i in range(num_rounds)
    ]


def medians(rounds: list[dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Program -> medians of process CPU and wall seconds of a step, see `interleaved`."""
    return {
        unit: {program: statistics.median(times[program][i] for times in rounds) for program in rounds[0]}
        for i, unit in enumerate(("cpu_s", "wall_s"))
    }


def _seconds_of_a_step(step: Callable[[], float]) -> list[float]:
    """CPU and wall seconds: the mean of consecutive steps, as in training, for `ROUND_S`."""
    cpu = time.process_time()
    start = time.perf_counter()
    wall = 0.0
    num_steps = 0
    while wall < ROUND_S:
        step()
        num_steps += 1
        wall = time.perf_counter() - start
    return [(_cpu_seconds_when_idle() - cpu) / num_steps, wall / num_steps]


def _cpu_seconds_when_idle() -> float:
    """The process's CPU seconds once no thread is busy: XLA frees a step's memory after its result is ready."""
    while True:
        before = time.process_time()
        time.sleep(0.005)
        after = time.process_time()
        if after - before < 0.001:
            return after


def prepared(layout: Layout, num_rows: int, *changes: str) -> Any:
    """The quickstart's run on simulated devices, with a larger model.

    Args:
      changes: further `key=value`.
    """
    from meshpar import simulate
    from meshpar.experiment.config import load
    from meshpar.experiment.prepare import prepare

    simulate(layout.num_devices)
    mesh = {"data": 1, "fsdp": 1, "tensor": 1} | layout.mesh
    overrides = [*MODEL, f"rules=[{layout.rules}]", f"data.batch_size={num_rows}"]
    overrides += [f"mesh.{axis}={size}" for axis, size in mesh.items()]
    # The rate is constant, so that the first steps change the loss.
    overrides += ["optim.schedule={kind: constant}"] + ([PIPELINE] if "pipe" in layout.mesh else [])
    return prepare(load(QUICKSTART, [*overrides, *layout.changes, *changes]))


def _with_documents(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Cuts each row into two documents, because the first batch of the corpus has only long documents."""
    rows, seq = batch["tokens"].shape
    first = (20 + 7 * np.arange(rows) % (seq - 40))[:, None]
    index = np.arange(seq, dtype=np.int32)
    is_second = index >= first
    return {
        "tokens": batch["tokens"],
        "targets": np.where(index == first - 1, -1, batch["targets"]).astype(np.int32),
        "segments": (1 + is_second).astype(np.int32),
        "positions": np.where(is_second, index - first, index).astype(np.int32),
    }


def _programs(layout: Layout, run: Any, batch: dict[str, np.ndarray]) -> dict[str, Callable[[], float]]:
    """Name -> a function that runs the next step, and returns its loss."""
    import jax

    import handwritten
    import handwritten_pipeline
    from byhand import convert, pipeline, step
    from byhand.axes import Axes

    rate = run.run.optim.learning_rate(run.run.num_steps)
    model = run.run.model
    axes = Axes(**layout.axes)
    placed = {name: jax.device_put(x, run.batch[name].sharding) for name, x in batch.items()}
    ours = run.compile_step()
    state = run.compile_init()()
    params = convert.from_llama(state.params, layout.mesh.get("tensor", 1))
    state = ours.prepare(state)
    if axes.stage:
        fast, first, rows = pipeline.compile_step(axes, run.mesh, params, batch, model, rate, NUM_MICROBATCHES)
    else:
        fast, first, rows = step.compile_step(axes, run.mesh, params, batch, model, rate)

    def with_meshpar(state: Any) -> tuple[Any, Any]:
        state, metrics = ours(state, placed)
        return state, metrics["loss"]

    programs = {
        "meshpar": stepping(with_meshpar, state),
        "by hand": stepping(lambda state: fast(state, rows), first),
    }
    if axes.per_token:
        return programs
    if axes.stage:
        scanned = handwritten_pipeline.init(model, run.mesh)
        scan, opt_state = handwritten_pipeline.compile_step(model, run.mesh, scanned, placed, rate, NUM_MICROBATCHES)
    else:
        scanned = handwritten.init(model, run.mesh)
        scan, opt_state = handwritten.compile_step(model, run.mesh, scanned, placed, rate)

    def with_scan(state: Any) -> tuple[Any, Any]:
        params, opt_state, loss = scan(*state, placed)
        return (params, opt_state), loss

    return programs | {"scan": stepping(with_scan, (scanned, opt_state))}


def stepping(step: Callable[[Any], tuple[Any, Any]], state: Any) -> Callable[[], float]:
    """A function that runs the next step of (state) -> (state, loss), and returns its loss."""
    import jax

    def call() -> float:
        nonlocal state
        state, loss = jax.block_until_ready(step(state))
        return float(loss)

    return call


def _check_equal(name: str, ours: list[float], by_hand: list[float]) -> None:
    if not np.allclose(ours, by_hand, rtol=TOLERANCE, atol=0):
        raise SystemExit(f"{name}: the hand-written step is not the same step: its losses are {by_hand}, ours {ours}")
