"""Compares the bytes that a plan estimates with those that are compiled: random layouts of a small llama on 8 H100s.

    python scripts/bench_memory.py [--layouts 20]

It needs XLA's compiler for GPUs (`pip install 'meshpar[gpu-target]'`), and no GPU. It prints the estimate over the
compiled bytes of each layout, then the median and the largest error.
"""

from __future__ import annotations

import argparse
import random
import statistics

from meshpar.errors import MeshparError
from meshpar.experiment.config import Run
from meshpar.mesh import targets
from meshpar.planning import search
from meshpar.planning.compiled import compiled
from meshpar.planning.machine import StatedMachine
from meshpar.planning.space import layouts
from meshpar.tree import human_bytes

WANTED_MEDIAN = 0.05
WANTED_LARGEST = 0.10
MODEL = {"num_layers": 8, "hidden_size": 2048, "num_heads": 16, "num_kv_heads": 8, "intermediate_size": 5632}
RUN = Run(
    model={"kind": "llama", "vocab_size": 32000, **MODEL},
    data={
        "kind": "synthetic",
        "vocab_size": 32000,
        "batch_size": 64,
        "seq_len": 2048,
        "documents_in_row": "joined",
    },
    optim={"kind": "adamw", "lr": 1e-3},
    precision={"compute": "bfloat16"},
    num_steps=10,
    run_dir="unused",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", type=int, default=20, help="how many are compiled")
    num_layouts = parser.parse_args().layouts
    machine = StatedMachine.of(targets.parse("h100:1x8"))
    every = list(layouts(RUN, machine.num_devices, machine.per_host))
    random.Random(1).shuffle(every)
    errors: list[float] = []
    print(f"{'ratio':>6} {'estimated':>12} {'compiled':>12}  layout")
    for layout in every:
        if len(errors) == num_layouts:
            break
        try:
            candidate = search.trace(RUN, layout, machine)
            if candidate is None:
                continue
            held = compiled(RUN, candidate, machine, at_most=0).held_bytes
        except MeshparError as error:
            print(f"{layout}: {error}")
            continue
        estimated = candidate.estimate.total_bytes
        errors.append(abs(estimated / held - 1))
        print(f"{estimated / held:>6.3f} {human_bytes(estimated):>12} {human_bytes(held):>12}  {layout}", flush=True)
    median = statistics.median(errors)
    print(f"median error {median:.1%}, largest {max(errors):.1%}")
    raise SystemExit(median > WANTED_MEDIAN or max(errors) > WANTED_LARGEST)


if __name__ == "__main__":
    main()
