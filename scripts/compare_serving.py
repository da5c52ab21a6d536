"""Compares a server's tokens per second of CPU time with generation in batches of as many rows.

    python scripts/compare_serving.py [ROUNDS]

Both answer the same prompts of mixed lengths, all of which wait at the beginning, on one device. They run in turn, and
the figure is the median of the rounds, so that other processes disturb both alike.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flax import nnx

from meshpar.interop.export import export
from meshpar.models import Llama
from meshpar.serve import bench
from meshpar.serve.open_engine import open_engine
from meshpar.serve.source import open_source
from meshpar.tree import flatten_with_paths

SLOTS = 16
LONGEST_PROMPT = 32
LONGEST_ANSWER = 192
NUM_REQUESTS = 96


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = open_source(random_llama(Path(folder) / "llama"))
        workload = bench.draw(NUM_REQUESTS, source.model.vocab_size, LONGEST_PROMPT, LONGEST_ANSWER)
        engine = open_engine(
            source, slots=SLOTS, max_len=LONGEST_PROMPT + LONGEST_ANSWER, chunk=LONGEST_PROMPT, max_queue=NUM_REQUESTS
        )
        generator = bench.generator_of(source, workload, SLOTS)
    ratios = []
    for _ in range(rounds):
        served_s = cpu_seconds(lambda: asyncio.run(bench.serve(engine, workload, math.inf)))
        generated_s = cpu_seconds(lambda: bench.generate("batches", generator, workload, SLOTS))
        ratios.append(generated_s / served_s)
        print(f"server {served_s:.2f} CPU s, batches {generated_s:.2f} CPU s: {ratios[-1]:.2f}", flush=True)
    print(f"{workload.num_tokens} tokens; median over {rounds} rounds: {statistics.median(ratios):.2f}")


def random_llama(folder: Path) -> Path:
    """A Hugging Face folder with random weights, on which the time of a token does not depend."""
    model = Llama(num_layers=4, hidden_size=256, num_heads=8, intermediate_size=704, vocab_size=1024)
    export(folder, model, flatten_with_paths(nnx.to_pure_dict(nnx.state(model.build(nnx.Rngs(0)), nnx.Param))))
    return folder


def cpu_seconds(work: Callable[[], Any]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
