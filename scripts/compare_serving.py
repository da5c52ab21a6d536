"""Compares a server with generation in batches of as many rows, and a server with drafts with one without them.

    python scripts/compare_serving.py batches [--rounds N]
    python scripts/compare_serving.py drafts [--rounds N] [--slots N]

All answer the same prompts of mixed lengths, all of which wait at the beginning, on one device. They run in turn, and
the figure is the median ratio of CPU seconds, so that other processes disturb both alike.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshpar import AdamW, Llama, Run, Synthetic, fit
from meshpar.serve import bench
from meshpar.serve.engine import Engine
from meshpar.serve.open_engine import open_engine
from meshpar.serve.paged_model import GREEDY
from meshpar.serve.sampling import Sampling
from meshpar.serve.source import Source, open_source

LONGEST_PROMPT = 32
LONGEST_ANSWER = 192
TEXTS = {
    "counting modulo 16, which repeats": GREEDY,
    "noise of 16 tokens, whose pairs recur with other followers": Sampling(temperature=100.0, seed=1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["batches", "drafts"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=16)
    arguments = parser.parse_args()
    compare = compare_batches if arguments.what == "batches" else compare_drafts
    with tempfile.TemporaryDirectory() as folder:
        compare(counting(Path(folder)), arguments.slots, arguments.rounds)


def counting(folder: Path) -> Source:
    """A Llama of 3.2 million parameters that has learned to count."""
    run = Run(
        model=Llama(num_layers=4, hidden_size=256, num_heads=8, intermediate_size=704, vocab_size=16),
        data=Synthetic(batch_size=8, seq_len=64, vocab_size=16, noise=0.0),
        optim=AdamW(lr=1e-3),
        num_steps=30,
        run_dir=folder,
    )
    fit(run, json=True)
    return open_source(folder)


def compare_batches(source: Source, slots: int, rounds: int) -> None:
    workload = bench.draw(6 * slots, source.model.vocab_size, LONGEST_PROMPT, LONGEST_ANSWER)
    engine = engine_of(source, slots, len(workload))
    batches = bench.batch_engine(source, workload, slots)
    compare(
        "batches", lambda: bench.generate("batches", batches, workload, slots),
        "server", lambda: asyncio.run(bench.serve(engine, workload, math.inf)), rounds,
    )  # fmt: skip


def compare_drafts(source: Source, slots: int, rounds: int) -> None:
    workload = bench.draw(3 * slots, source.model.vocab_size, LONGEST_PROMPT, LONGEST_ANSWER)
    engine = engine_of(source, slots, len(workload), ngrams=2)
    drafter = engine.drafter
    for text, sampling in TEXTS.items():

        def serve(drafter: Any, sampling: Sampling = sampling) -> bench.Load:
            engine.drafter = drafter
            return asyncio.run(bench.serve(engine, workload, math.inf, sampling))

        print(text)
        load = compare("without drafts", lambda: serve(None), "with drafts", lambda: serve(drafter), rounds)
        print(f"{load.acceptance or 0:.0%} of drafts accepted")


def compare(slower: str, one: Callable[[], Any], faster: str, other: Callable[[], Any], rounds: int) -> bench.Load:
    """Prints the CPU seconds of `one` over those of `other`. Returns what `other` returned last."""
    ratios = []
    for _ in range(rounds):
        one_s, _ = timed(one)
        other_s, load = timed(other)
        ratios.append(one_s / other_s)
        print(f"{slower} {one_s:.2f} CPU s, {faster} {other_s:.2f} CPU s: {ratios[-1]:.2f}", flush=True)
    print(f"median over {rounds} rounds: {statistics.median(ratios):.2f}")
    return load


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds, and what `work` returns."""
    begin = time.process_time()
    found = work()
    return time.process_time() - begin, found


def engine_of(source: Source, slots: int, num_requests: int, ngrams: int | None = None) -> Engine:
    return open_engine(
        source, slots=slots, max_len=LONGEST_PROMPT + LONGEST_ANSWER, chunk=LONGEST_PROMPT, max_queue=num_requests,
        ngrams=ngrams,
    )  # fmt: skip


if __name__ == "__main__":
    main()
