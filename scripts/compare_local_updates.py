"""Compares local updates with the synchronous step: held-out loss, and bytes that a device sends across slices.

    python scripts/compare_local_updates.py --every 16 --steps 304

It trains the quickstart on four slices of two devices each, with the same batches.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
from contextlib import redirect_stdout
from fractions import Fraction
from pathlib import Path

from meshpar import fit, load, prepare, simulate

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
SLICES = ["mesh.replica=4", "mesh.data=1", "mesh.fsdp=1", "mesh.tensor=2", "rules=megatron"]
METHODS = {
    "synchronous": [],
    "local SGD": ["parallel.local.outer=average"],
    "DiLoCo": ["parallel.local.outer=nesterov"],
    "DiLoCo, int8": ["parallel.local.outer=nesterov", "parallel.local.compress={kind: int8, error_feedback: true}"],
    "DiLoCo after 64 steps": ["parallel.local.outer=nesterov", "parallel.local.start=64"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=16)
    parser.add_argument("--steps", type=int, default=304)
    parser.add_argument("methods", nargs="*", default=list(METHODS), help=f"default: all of {', '.join(METHODS)}")
    arguments = parser.parse_args()
    simulate(8)
    print("| method | held-out loss | bytes across slices, a step |\n|---|---|---|", flush=True)
    for name in arguments.methods:
        keys = [*METHODS[name], f"parallel.local.every={arguments.every}"] if METHODS[name] else []
        loss, sent = trained([*SLICES, *keys, f"num_steps={arguments.steps}", "loggers=[]"])
        print(f"| {name} | {loss:.4f} | {sent:,.0f} |", flush=True)


def trained(keys: list[str]) -> tuple[float, float]:
    """The last held-out loss of a run, and the mean bytes that a device sends across slices in a step."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        run = load(CONFIG, [*keys, f"run_dir={folder}"])
        fit(run, json=True)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    sent = sum(num for axes, num in (prepare(run).traced_bytes or {}).items() if "replica" in axes)
    if local := run.parallel.local:  # each step before the first round sends as much as a round at its end
        sent *= Fraction(local.start * local.every + run.num_steps - local.start, run.num_steps)
    records = map(json.loads, reversed(lines))
    return next(record["loss"] for record in records if record["kind"] == "evaluation"), float(sent)


if __name__ == "__main__":
    main()
