"""Counts the gathers of a step for eight chips, and those that are early, with and without prefetch.

python -m tests.program.prefetching h100:1x8
"""

from __future__ import annotations

import sys

from meshpar import AdamW, AxisRules, Llama, MeshLayout, Run, Synthetic
from meshpar.experiment.prepare import prepare
from meshpar.mesh import process, targets
from meshpar.parallel.strategies import FullySharded, Parallel
from tests.program.test_prefetch import gathers_in_loops


def main() -> None:
    run = Run(
        model=Llama(num_layers=4, hidden_size=256, num_heads=4, intermediate_size=512, vocab_size=256),
        data=Synthetic(batch_size=8, seq_len=256, vocab_size=256),
        optim=AdamW(lr=1e-3),
        mesh=MeshLayout(fsdp=8),
        rules=AxisRules(preset="fsdp"),
        num_steps=1,
        run_dir="unused",
    )
    process.compile_only()
    mesh = run.mesh.build(targets.parse(sys.argv[1]).devices())
    for overlap in ("prefetch", "none"):
        prepared = prepare(run.model_copy(update={"parallel": Parallel(fsdp=FullySharded(overlap=overlap))}), mesh)
        step = prepared.compile_step()
        found = prepared.inspect(step)
        num, num_early = gathers_in_loops(step.text)
        print(f"{found.bytes_per_axis['fsdp']} bytes, {num} gathers, {num_early} early")


if __name__ == "__main__":
    main()
