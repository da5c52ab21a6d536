"""Compares the planner's estimates with measured steps: on 8 simulated devices, for three small models.

    export XLA_FLAGS=--xla_cpu_use_fusion_emitters=false   # optional: on jax 0.10 it compiles three times as fast
    meshpar calibrate here.yaml
    python scripts/bench_plan.py here.yaml [wide|deep|vocabulary ...] [--layouts 40] [--rounds 5] [--save FOLDER]

For each model a random sample of all layouts that fit, and the plan's own choice, are compiled and timed in turn in one
process. Printed are the rank correlation (Spearman) of estimates and measured times, and the measured time of the
plan's choice over that of the fastest. Times are process CPU seconds over cores, as in the calibration.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import meshpar
from compare import interleaved, stepping
from meshpar.experiment.config import Run
from meshpar.experiment.prepare import prepare
from meshpar.planning import search
from meshpar.planning.measured import MeasuredMachine, read
from meshpar.planning.space import Layout, layouts

NUM_DEVICES = 8
WANTED_CORRELATION = 0.8
WANTED_RATIO = 1.10
MODELS = {
    "wide": {"num_layers": 2, "hidden_size": 128, "num_heads": 8, "intermediate_size": 512, "vocab_size": 256},
    "deep": {"num_layers": 8, "hidden_size": 32, "num_heads": 8, "intermediate_size": 96, "vocab_size": 256},
    "vocabulary": {"num_layers": 2, "hidden_size": 32, "num_heads": 8, "intermediate_size": 96, "vocab_size": 8192},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="a file that `meshpar calibrate` wrote")
    parser.add_argument("models", nargs="*", help="default: all")
    parser.add_argument("--layouts", type=int, default=40, help="how many are timed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=Path, help="a folder for the times, as JSON")
    arguments = parser.parse_args()
    meshpar.simulate(NUM_DEVICES)
    machine = read(arguments.target)
    is_worse = False
    print(f"{'model':<12} {'layouts':>8} {'correlation':>12} {'choice':>10} {'best':>10} {'ratio':>6}", flush=True)
    for name in arguments.models or MODELS:
        rows = measure(run_of(name), machine, str(arguments.target), arguments.layouts, arguments.rounds)
        if arguments.save:
            (arguments.save / f"{name}.json").write_text(json.dumps(rows, indent=2))
        correlation = rank_correlation([row["estimated_s"] for row in rows], [row["measured_s"] for row in rows])
        choice = rows[0]["measured_s"]
        best = min(row["measured_s"] for row in rows)
        is_worse |= correlation < WANTED_CORRELATION or choice > WANTED_RATIO * best
        times = f"{1e3 * choice:>7.2f} ms {1e3 * best:>7.2f} ms {choice / best:>6.3f}"
        print(f"{name:<12} {len(rows):>8} {correlation:>12.3f} {times}", flush=True)
    raise SystemExit(is_worse)


def run_of(name: str) -> Run:
    return Run(
        model={"kind": "llama", **MODELS[name]},
        data={"kind": "synthetic", "vocab_size": MODELS[name]["vocab_size"], "batch_size": 16, "seq_len": 64},
        optim={"kind": "adamw", "lr": 1e-3},
        num_steps=10,
        run_dir="unused",
    )


def measure(run: Run, machine: MeasuredMachine, target: str, num_layouts: int, num_rounds: int) -> list[dict[str, Any]]:
    """Estimated and measured seconds of layouts: the plan's choice, then a sample of all."""
    chosen = meshpar.plan(run, target).ranked[0].layout
    every = [layout for layout in layouts(run, NUM_DEVICES, NUM_DEVICES) if layout != chosen]
    random.Random(0).shuffle(every)
    candidates = []
    for layout in [chosen, *every]:
        if len(candidates) < num_layouts and (candidate := search.trace(run, layout, machine)):
            candidates.append(candidate)
    programs = {str(one.layout): compiled(run, one.layout) for one in candidates}
    for program in programs.values():
        program()
    cpu_s = interleaved(programs, num_rounds)["cpu_s"]
    return [
        {
            "layout": str(one.layout),
            "estimated_s": one.estimate.total_s,
            "measured_s": cpu_s[str(one.layout)] / (os.cpu_count() or 1),
            "terms_s": dict(one.estimate.terms),
        }
        for one in candidates
    ]


def compiled(run: Run, layout: Layout) -> Callable[[], float]:
    """A function that runs the next step of a run in a layout."""
    prepared = prepare(layout.applied(run))
    step = prepared.compile_step()
    # Parameters that are all zero take as long as others, and need no program to initialize them.
    structs = prepared.on_prepared_states.placement.structs
    state = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), structs)
    batch = {name: jax.device_put(x, prepared.batch[name].sharding) for name, x in run.data.train(run.seed)[0].items()}

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
