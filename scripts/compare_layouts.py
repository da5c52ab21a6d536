"""Trains the quickstart for three steps in thirteen layouts, and prints loss, communication and memory of each.

    python scripts/compare_layouts.py [NAME ...]
    python scripts/compare_layouts.py --write    # all, into docs/guides/which-layout.md and its pictures: make pictures

Bytes of each axis and memory are read from the compiled step, on eight simulated CPU devices. All layouts see the same
batches.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

import pictures
from meshpar import load, prepare, simulate
from meshpar.tree import human_bytes

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
NUM_STEPS = 3
LAYOUTS = {
    "one device": ["mesh={data: 1}", "rules=replicated"],
    "data 8": ["mesh={data: 8}", "rules=replicated"],
    "ZeRO-1": ["mesh={fsdp: 8}", "rules=zero1"],
    "ZeRO-2": ["mesh={fsdp: 8}", "rules=zero2"],
    "ZeRO-3": ["mesh={fsdp: 8}", "rules=fsdp"],
    "ZeRO-3 in two groups": ["mesh={replica: 2, fsdp: 4}", "rules=hsdp"],
    "tensor 4": ["mesh={data: 2, tensor: 4}", "rules=megatron"],
    "tensor 4, sequence": ["mesh={data: 2, tensor: 4}", "rules=megatron_sp"],
    "ZeRO-3 and tensor": ["mesh={data: 2, fsdp: 2, tensor: 2}", "rules=[fsdp, megatron]"],
    "the same, by GSPMD": ["mesh={data: 2, fsdp: 2, tensor: 2}", "rules=[fsdp, megatron]", "lowering=auto"],
    "context 4": ["mesh={fsdp: 2, context: 4}", "rules=[fsdp, context]"],
    "pipeline": [
        "mesh={data: 2, pipe: 4}", "rules=pipeline", "parallel.pipeline={kind: 1f1b, num_microbatches: 8}",
    ],
    "pipeline, ZeRO-3, tensor": [
        "mesh={fsdp: 2, pipe: 2, tensor: 2}", "rules=[pipeline, fsdp, megatron]",
        "parallel.pipeline={kind: zb_h1, num_microbatches: 8}",
    ],
}  # fmt: skip
"""Name -> overrides of the quickstart."""
RECOMPUTED = {
    f"{name}, recomputed": [*LAYOUTS[name], "model.remat=full"] for name in ("tensor 4", "tensor 4, sequence")
}
"""What the page says of them beside the table."""


class Row(NamedTuple):
    """The results of a layout; bytes are those of one device, by the axes over which they travel."""

    name: str
    loss: float
    sent: dict[str, int]
    held: int


def measured(name: str, changes: Sequence[str] = ()) -> Row:
    """Compiles and trains one layout."""
    run = load(CONFIG, [*(LAYOUTS | RECOMPUTED)[name], *changes])
    prepared = prepare(run, run.mesh.build(jax.devices()[: run.mesh.requested()]))
    step = prepared.compile_step()
    state = step.prepare(prepared.compile_init()())
    data = run.data.train(run.seed)
    metrics = {}
    for i in range(NUM_STEPS):
        state, metrics = step(state, prepared.put(data[i]))
    inspection = prepared.inspect(step)
    return Row(name, float(metrics["loss"]), inspection.bytes_per_axis, inspection.memory.total)


def table(rows: Iterable[Row]) -> str:
    lines = [f"| layout | loss of step {NUM_STEPS} | sends in a step, over | holds |", "|---|---|---|---|"]
    for row in rows:
        lines.append(f"| {row.name} | {row.loss:.4f} | {sent(row.sent)} | {human_bytes(row.held)} |")
    return "\n".join(lines)


def sent(by_axes: Mapping[str, float]) -> str:
    """All bytes, and those over each combination of axes from 1 KiB on."""
    if not by_axes:
        return "nothing"
    parts = ", ".join(f"{axes} {human_bytes(num)}" for axes, num in sorted(by_axes.items()) if num >= 1024)
    return f"{human_bytes(sum(by_axes.values()))}: {parts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(LAYOUTS), help="default: all")
    parser.add_argument("--write", action="store_true", help="replace the table of the page, and its pictures")
    given = parser.parse_args()
    simulate(8)
    made = table(map(measured, given.names))
    print(made)
    if given.write:
        page = pictures.PAGE.read_text()
        pictures.PAGE.write_text(page.replace(pictures.table_of(page), made))
        pictures.draw()


if __name__ == "__main__":
    main()
