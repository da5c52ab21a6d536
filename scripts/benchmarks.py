"""Records, per release, what the quickstart's step sends, computes and holds in each layout, and what compiling takes.

    python scripts/benchmarks.py                  # prints the figures of this version
    python scripts/benchmarks.py --write          # and puts them into docs/benchmarks.json
    python scripts/benchmarks.py --write --steps  # and times steps beside hand-written ones, which takes minutes
    python scripts/benchmarks.py --compare "data 8"    # what grew since the last release, if anything

Bytes, FLOPs and temporaries are those of one of eight simulated CPU devices; they are exact, and tests fail when one of
them grows. Seconds are of the CPU; they depend on the machine, which is written beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

import compare_layouts
import measure
from meshpar import load, prepare, simulate

FILE = Path(__file__).parents[1] / "docs" / "benchmarks.json"
COUNTS = ("sent_bytes", "flops", "temporary_bytes")
TIMED = ("single", "data", "fsdp", "tensor", "pipe_data")
"""Layouts of `compare.py` whose steps are timed beside the fastest that we can write by hand."""


def counts(name: str) -> dict[str, float]:
    """What one device does in a step of a layout of `compare_layouts.py`, read from the compiled program.

    `compile_s` is the CPU seconds of tracing, lowering and compiling.
    """
    run = load(compare_layouts.CONFIG, compare_layouts.LAYOUTS[name])
    prepared = prepare(run, run.mesh.build(jax.devices()[: run.mesh.requested()]))
    start = time.process_time()
    step = prepared.compile_step()
    compile_s = time.process_time() - start
    found = prepared.inspect(step)
    figures = (sum(found.bytes_per_axis.values()), found.flops, found.memory.temporaries)
    return dict(zip(COUNTS, figures, strict=True)) | {"compile_s": round(compile_s, 2)}


def grown(name: str, found: dict[str, float]) -> list[str]:
    """The counts of a layout that are larger than those of the last release, in words."""
    recorded = list(json.loads(FILE.read_text()).values())[-1]["layouts"][name]
    return [f"{name}: {key} {found[key]}, was {recorded[key]}" for key in COUNTS if found[key] > recorded[key]]


def step_ratio(name: str) -> float:
    """CPU seconds of a step over those of the hand-written one, see `bench_step.py`."""
    times = measure.step_ratios(name)["cpu_s"]
    return round(times["meshpar"] / times["by hand"], 3)


def entry(are_timed: bool) -> dict[str, Any]:
    layouts = {name: counts(name) for name in compare_layouts.LAYOUTS}
    ratios = {"step_ratios": {name: step_ratio(name) for name in TIMED}} if are_timed else {}
    machine = f"{os.cpu_count()}-core {platform.machine()}, 8 simulated CPU devices, jax {version('jax')}"
    return {"date": date.today().isoformat(), "machine": machine, "layouts": layouts, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", metavar="LAYOUT", help="print what grew in one layout since the last release")
    parser.add_argument("--write", action="store_true", help="under the version of meshpar, in docs/benchmarks.json")
    parser.add_argument("--steps", action="store_true", help="time steps, too")
    given = parser.parse_args()
    simulate(8)
    if given.compare:
        print("\n".join(grown(given.compare, counts(given.compare))))
        return
    made = {version("meshpar"): entry(given.steps)}
    print(json.dumps(made, indent=2))
    if given.write:
        FILE.write_text(json.dumps(json.loads(FILE.read_text()) | made, indent=2) + "\n")


if __name__ == "__main__":
    main()
