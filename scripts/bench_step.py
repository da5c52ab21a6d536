"""Measures the overhead of meshpar: times of a step, of Python, of imports, compiling and starting, and host memory.

    python scripts/bench_step.py [step|python|import|compile|start|warm|memory ...] [--json]

Ratios compare medians of interleaved runs in one process. Simulated devices share the cores of one machine, so the
ratios show that the programs do the same work, not how fast they would be on real devices.
"""

from __future__ import annotations

import argparse
import json

import measure
import measure_start

MEASURES = {
    # name: (description, limit, function that measures it)
    "step": ("step time over a hand-written jit's", 1.03, measure.step_ratio),
    "python": (
        "microseconds of Python per step in addition to the executable, 400 leaves",
        50.0,
        measure.python_microseconds,
    ),
    "import": ("import meshpar over import jax, flax, optax", 1.1, measure.import_ratio),
    "compile": ("compile time for 512 devices over 8", 1.15, measure.compile_ratio),
    "start": ("train to its first step over a bare jit's, CPU seconds", 1.10, measure_start.cold_over_bare),
    "warm": ("the same with a filled compilation cache, over an empty one", 0.35, measure_start.warm_over_cold),
    "memory": ("peak host memory of initializing a sharded state over its bytes", 1.3, measure.memory_ratio),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measures", nargs="*", help="default: all")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    results = {}
    for name in arguments.measures or MEASURES:
        what, limit, how = MEASURES[name]
        results[name] = how() | {"what": what, "limit": limit}
        if not arguments.json:
            print(f"{name:<8} {results[name]['value']:8.3f}  limit {limit:<5} {what}", flush=True)
    if arguments.json:
        print(json.dumps(results, indent=2))
    raise SystemExit(any(r["value"] > r["limit"] for r in results.values()))


if __name__ == "__main__":
    main()
