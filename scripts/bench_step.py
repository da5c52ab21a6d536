"""Measures the overhead of meshpar: times of a step, of Python, of imports, compiling and starting, and host memory.

    python scripts/bench_step.py [step|python|import|compile|start|warm|memory|blocks|plain|plainstages|plain2048
        |long ...] [--layouts NAME ...] [--rounds 9] [--json]

`step` compares process CPU seconds with two hand-written programs, in each layout of eight simulated devices, and on
one: the fastest that we can write (`byhand/`), and the usual one (`handwritten.py`, a scan over layers). Ratios compare
medians of interleaved rounds in three processes; in a round each program runs for a second. Simulated devices share the
cores of one machine, so the ratios show that the programs do the same work, not how fast they would be on real devices.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import measure
import measure_attention
import measure_plain
import measure_start
from compare import LAYOUTS

MEASURES = {
    # name: (description, limit, function that measures it)
    "python": (
        "microseconds of Python per step in addition to the executable, 400 leaves",
        20.0,
        measure.python_microseconds,
    ),
    "import": ("import meshpar over import jax, flax, optax", 1.1, measure.import_ratio),
    "compile": ("compile time for 512 devices over 8", 1.15, measure.compile_ratio),
    "start": ("train to its first step over a bare jit's, CPU seconds", 1.10, measure_start.cold_over_bare),
    "warm": ("the same with a filled compilation cache, over an empty one", 0.35, measure_start.warm_over_cold),
    "memory": ("peak host memory of initializing a sharded state over its bytes", 1.3, measure.memory_ratio),
    "blocks": (
        "a step with attention in blocks over one with the reference, 256 tokens, CPU seconds",
        0.90,
        measure_attention.of_256_tokens,
    ),
    "plain": (
        "a plain Flax llama's step over that of kind: llama, eight devices, CPU seconds",
        1.05,
        measure_plain.of_cpu_seconds,
    ),
    "plainstages": (
        "the same in four stages of two devices, 4 microbatches",
        1.05,
        measure_plain.of_stages,
    ),
    "plain2048": (
        "the same, temporaries for a row of 2,048 tokens",
        1.10,
        measure_plain.of_temporaries,
    ),
    "long": ("the same, 2048 tokens", 0.90, measure_attention.of_2048_tokens),
}
STEP_LIMIT = 1.02
"""The limit of the step's CPU seconds over those of the fastest hand-written step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measures", nargs="*", help="default: all")
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=9, help="rounds of steps, shared by three processes")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    is_over = False
    for name in arguments.measures or ["step", *MEASURES]:
        if name == "step":
            results[name] = {}
            if not arguments.json:
                _print_step_header()
            for layout in arguments.layouts:
                row = results[name][layout] = measure.step_ratios(layout, arguments.rounds)
                is_over |= _is_over(row)
                if not arguments.json:
                    _print_step(layout, row)
            continue
        what, limit, how = MEASURES[name]
        results[name] = how() | {"what": what, "limit": limit}
        is_over |= results[name]["value"] > limit
        if not arguments.json:
            print(f"{name:<8} {results[name]['value']:8.3f}  limit {limit:<5} {what}", flush=True)
    if arguments.json:
        print(json.dumps(results, indent=2))
    raise SystemExit(is_over)


def _ratio(times: dict[str, float], other: str) -> float:
    return times["meshpar"] / times[other]


def _is_over(row: dict[str, Any]) -> bool:
    over_scan = row["scan_limit"] is not None and _ratio(row["cpu_s"], "scan") > row["scan_limit"]
    return _ratio(row["cpu_s"], "by hand") > STEP_LIMIT or over_scan


def _print_step_header() -> None:
    print(f"{'':<12} {'CPU ms of a step':^29} {'over by hand':^22} {'over the scan':^22}")
    limits = f" {'CPU':>6} {'limit':>6} {'wall':>6} " * 2
    columns = f"{'layout':<12} {'meshpar':>9} {'by hand':>9} {'scan':>9} " + limits
    print(columns, flush=True)


def _print_step(layout: str, row: dict[str, Any]) -> None:
    times = "".join(f" {row['cpu_s'].get(program, 0) * 1e3:>9.1f}" for program in ("meshpar", "by hand", "scan"))
    ratios = ""
    for other, limit in (("by hand", STEP_LIMIT), ("scan", row["scan_limit"])):
        if other not in row["cpu_s"]:
            continue
        shown = "-" if limit is None else f"{limit:.2f}"
        ratios += f"  {_ratio(row['cpu_s'], other):>6.3f} {shown:>6} {_ratio(row['wall_s'], other):>6.3f} "
    print(f"{layout:<12}{times}{ratios}", flush=True)


if __name__ == "__main__":
    main()
