"""Compares the planner's estimates with measured steps on simulated devices: of three llamas and two Flax models.

    meshpar calibrate here.yaml
    python scripts/bench_plan.py here.yaml [wide|deep|vocabulary|vit|encoder ...] [--layouts 40] [--rounds 20]
                                 [--processes 2] [--times FOLDER]

The Flax models are those of configs/examples, a little larger: a vision transformer and a masked encoder, which the
partitioner divides. For each model a random sample of all layouts that fit, and the plan's own choice, are compiled and
timed in turn. It prints the rank correlation (Spearman) of estimates and measured times, and the measured time of the
layout that the estimates put first over that of the fastest: once for the whole cost model, once for each control, a
cost model that overlooks a term. The last line of a model has what half of the processes say of the others' times.

A time is that of the second of two steps: the first one pays for the memory that other programs used. Every layout is
compiled in two processes, and its time is the mean of theirs, since the same program takes up to a fifth longer in one
process than in another. It is the process's CPU seconds over cores, as in the calibration. If each device has a core of
its own (`meshpar calibrate here.yaml --devices 2`) it is the wall time, which bubbles of a pipeline make longer: then
nothing else may run on the machine. With --times, measured times are written to FOLDER, and read from there by later
calls, so that a changed cost model is compared with the same measurements.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import numpy as np

import meshpar
from compare import stepping
from meshpar.cost.touched import TRANSPOSE
from meshpar.experiment.config import Run
from meshpar.experiment.prepare import prepare
from meshpar.interop import user_code
from meshpar.planning import search
from meshpar.planning.constraints import constrained
from meshpar.planning.measured import FunctionTime, MeasuredMachine, Point, read
from meshpar.planning.search import Candidate
from meshpar.planning.space import Layout

EXAMPLES = Path(__file__).resolve().parent.parent / "configs" / "examples"
PER_PROCESS = 6
WANTED_CORRELATION = 0.8
WANTED_RATIO = 1.10
LLAMAS = {
    "wide": {"num_layers": 2, "hidden_size": 128, "num_heads": 8, "intermediate_size": 512, "vocab_size": 256},
    "deep": {"num_layers": 8, "hidden_size": 32, "num_heads": 8, "intermediate_size": 96, "vocab_size": 256},
    "vocabulary": {"num_layers": 2, "hidden_size": 32, "num_heads": 8, "intermediate_size": 96, "vocab_size": 8192},
}
SIZES = {"width": 64, "heads": 8, "layers": 4}
FLAX = {
    "vit": {
        "model": {"kind": "import", "target": "digits_vit:ViT", "arguments": SIZES},
        "data": {"kind": "import", "target": "digits_vit:rows", "batch_size": 64},
        "loss": {"kind": "classify"},
    },
    "encoder": {
        "model": {"kind": "import", "target": "masked_tokens:Encoder", "arguments": SIZES},
        "data": {"kind": "import", "target": "masked_tokens:rows", "batch_size": 64},
        "loss": {"kind": "masked_tokens", "mask_id": 1, "pad_id": 0, "vocab_size": 64},
    },
}
MODELS = (*LLAMAS, *FLAX)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="a file that `meshpar calibrate` wrote")
    parser.add_argument("models", nargs="*", help="default: all")
    parser.add_argument("--layouts", type=int, default=40, help="how many are timed")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2, help="in how many processes each layout is timed")
    parser.add_argument("--times", type=Path, help="a folder of measured times, as JSON")
    arguments = parser.parse_args()
    machine = read(arguments.target)
    is_worse = False
    print(f"{'model':<12} {'cost model':<28} {'layouts':>8} {'correlation':>12} {'choice / best':>14}", flush=True)
    if arguments.times:
        arguments.times.mkdir(parents=True, exist_ok=True)
    for name in arguments.models or MODELS:
        chosen = sample(run_of(name), machine, str(arguments.target), arguments.layouts)
        path = arguments.times / f"{name}.json" if arguments.times else None
        known: dict[str, list[float]] = json.loads(path.read_text()) if path and path.exists() else {}
        for process in range(arguments.processes):
            missing = [one.layout for one in chosen if len(known.get(str(one.layout), ())) <= process]
            for layout, seconds in timed(name, machine, missing, arguments.rounds).items():
                known.setdefault(layout, []).append(seconds)
            if path:
                path.write_text(json.dumps(known, indent=2))
        every = [known[str(one.layout)][: arguments.processes] for one in chosen]
        measured = [*map(statistics.mean, every)]
        for cost_model, changed in cost_models(machine).items():
            works = [replace(one.work, idle=1.0) if cost_model == "no bubbles" else one.work for one in chosen]
            is_good = compare(name, cost_model, [work.on(changed).total_s for work in works], measured)
            is_worse |= cost_model == "whole" and not is_good
        if arguments.processes > 1:
            halves = ([statistics.mean(times[start::2]) for times in every] for start in (0, 1))
            compare(name, "times in other processes", *halves)
    raise SystemExit(is_worse)


def compare(name: str, cost_model: str, estimated: list[float], measured: list[float]) -> bool:
    """Prints a line of the table, and returns whether the estimates are as good as they have to be."""
    correlation = rank_correlation(estimated, measured)
    ratio = measured[int(np.argmin(estimated))] / min(measured)
    print(f"{name:<12} {cost_model:<28} {len(measured):>8} {correlation:>12.3f} {ratio:>14.3f}", flush=True)
    return correlation >= WANTED_CORRELATION and ratio <= WANTED_RATIO


def cost_models(machine: MeasuredMachine) -> dict[str, MeasuredMachine]:
    """The machine, and controls, whose costs lack a term. `main` takes bubbles out of the work itself."""

    def proportional(times: Sequence[Point]) -> tuple[Point, ...]:
        """Times without what they have at size 0: in proportion to that of the largest size."""
        last = times[-1]
        return (Point(size=last.size * 1e-9, seconds=last.seconds * 1e-9), last)

    functions = [FunctionTime(name=one.name, seconds=1e-15) for one in machine.functions]
    others = [one for one in machine.functions if one.name != TRANSPOSE]
    collectives = [{**dict(one), "times": proportional(one.times)} for one in machine.collectives]
    no_latency = {
        "products": proportional(machine.products),
        "elementwise": proportional(machine.elementwise),
        "collectives": collectives,
    }
    changes = {
        "whole": {},
        "no latency": no_latency,
        "no latency of collectives": {"collectives": collectives},
        "no functions": {"functions": functions},
        "no transpositions": {"functions": [*others, FunctionTime(name=TRANSPOSE, seconds=1e-15)]},
        "no new memory": {"new_memory": [Point(size=1, seconds=1e-15)]},
        "no bubbles": {},
    }
    return {
        name: MeasuredMachine.model_validate(dict(machine) | change) if change else machine
        for name, change in changes.items()
    }


def run_of(name: str) -> Run:
    return Run(**sections(name), optim={"kind": "adamw", "lr": 1e-3}, num_steps=10, run_dir="unused")


def sections(name: str) -> dict[str, Any]:
    """The sections of a run's config that depend on its model. A model in Flax is allowed to be imported."""
    if name in LLAMAS:
        data = {"kind": "synthetic", "vocab_size": LLAMAS[name]["vocab_size"], "batch_size": 16, "seq_len": 64}
        return {"model": {"kind": "llama", **LLAMAS[name]}, "data": data}
    found = FLAX[name]
    for section in ("model", "data"):
        target = found[section]["target"]
        user_code.name(EXAMPLES / f"{target.partition(':')[0]}.py")
        user_code.permit(target, None)
    return {**found, "rules": {"preset": "replicated", "unnamed": []}}


def sample(run: Run, machine: MeasuredMachine, target: str, num_layouts: int) -> list[Candidate]:
    """The plan's choice, then a sample of all layouts."""
    chosen = meshpar.plan(run, target).ranked[0]
    every, _ = constrained(run, machine, {})
    random.Random(0).shuffle(every)
    traced = (search.trace(run, layout, machine) for layout in every if layout != chosen.layout)
    return [chosen, *islice(filter(None, traced), num_layouts - 1)]


def timed(name: str, machine: MeasuredMachine, chosen: Sequence[Layout], num_rounds: int) -> dict[str, float]:
    """Seconds of a step in each layout: the median of the rounds, in which layouts take turns.

    Several processes hold a few of the programs each, two of which compile at once.
    """
    spawn = multiprocessing.get_context("spawn")
    workers: list[Connection] = []
    for start in range(0, len(chosen), PER_PROCESS):
        mine, theirs = spawn.Pipe()
        spawn.Process(
            target=work, args=(theirs, name, machine, chosen[start : start + PER_PROCESS]), daemon=True
        ).start()
        theirs.close()  # so that `recv` fails if the process ends
        workers.append(mine)
        if len(workers) > 1:
            workers[-2].recv()
    if workers:
        workers[-1].recv()
    found: dict[str, list[float]] = {str(layout): [] for layout in chosen}
    for _ in range(num_rounds if chosen else 0):
        for index, layout in enumerate(chosen):
            worker = workers[index // PER_PROCESS]
            worker.send(index % PER_PROCESS)
            found[str(layout)].append(worker.recv())
    for worker in workers:
        worker.send(None)
    return {layout: statistics.median(times) for layout, times in found.items() if times}


def work(requests: Connection, name: str, machine: MeasuredMachine, chosen: Sequence[Layout]) -> None:
    """Compiles some layouts of a model, and measures the one whose index is requested."""
    meshpar.simulate(machine.num_devices)
    clock = cpu_s if machine.shares_cores else time.perf_counter
    programs = [compiled(run_of(name), layout) for layout in chosen]
    requests.send("compiled")
    while (index := requests.recv()) is not None:
        step = programs[index]
        step()
        start = clock()
        step()
        requests.send(clock() - start)


def cpu_s() -> float:
    """CPU seconds of the process over the cores."""
    return time.process_time() / (os.cpu_count() or 1)


def compiled(run: Run, layout: Layout) -> Callable[[], float]:
    """A function that runs the next step of a run in a layout."""
    prepared = prepare(layout.applied(run))
    step = prepared.compile_step()
    # Parameters that are all zero take as long as others, and need no program to initialize them.
    structs = prepared.on_prepared_states.placement.structs
    state = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), structs)
    state = step.prepare(state)  # once, as in training
    train, _ = run.data.datasets(run.seed)
    batch = prepared.put(train.rows(0, np.arange(run.data.batch_size)))

    def one(state: Any) -> tuple[Any, Any]:
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    return stepping(one, state)


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's: the correlation of the ranks."""
    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


if __name__ == "__main__":
    main()
