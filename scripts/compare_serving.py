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

from flax import nnx

from meshpar.interop.export import export
from meshpar.models import Llama
from meshpar.serve import bench
from meshpar.serve.open_engine import open_engine
from meshpar.serve.paged_model import GREEDY
from meshpar.serve.sampling import Sampling
from meshpar.serve.source import open_source
from meshpar.tree import flatten_with_paths

LONGEST_PROMPT = 32
LONGEST_ANSWER = 192
NUM_REQUESTS = 96
TEXTS = {
    "greedy, which soon repeats": GREEDY,
    "drawn from 4 tokens, whose pairs repeat": Sampling(temperature=100.0, top_k=4, seed=1),
    "drawn from all tokens, which does not repeat": Sampling(temperature=100.0, seed=1),
}
"""What a model with random weights generates -> how it is sampled."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["batches", "drafts"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=16)
    arguments = parser.parse_args()
    compare = compare_batches if arguments.what == "batches" else compare_drafts
    with tempfile.TemporaryDirectory() as folder:
        compare(open_source(random_llama(Path(folder) / "llama")), arguments.slots, arguments.rounds)


def compare_batches(source: Any, slots: int, rounds: int) -> None:
    workload = bench.draw(NUM_REQUESTS, source.model.vocab_size, LONGEST_PROMPT, LONGEST_ANSWER)
    engine = engine_of(source, slots)
    generator = bench.generator_of(source, workload, slots)
    compare(
        "batches", lambda: bench.generate("batches", generator, workload, slots),
        "server", lambda: asyncio.run(bench.serve(engine, workload, math.inf)), rounds,
    )  # fmt: skip


def compare_drafts(source: Any, slots: int, rounds: int) -> None:
    workload = bench.draw(3 * slots, source.model.vocab_size, LONGEST_PROMPT, LONGEST_ANSWER)
    engine = engine_of(source, slots, ngrams=2)
    drafter = engine.drafter
    for text, sampling in TEXTS.items():

        def serve(drafter: Any, sampling: Sampling = sampling) -> bench.Load:
            engine.drafter = drafter
            return asyncio.run(bench.serve(engine, workload, math.inf, sampling))

        print(text)
        load = compare("one by one", lambda: serve(None), "drafts", lambda: serve(drafter), rounds)
        print(f"{load.acceptance or 0:.0%} of drafts accepted")


def compare(slower: str, one: Callable[[], Any], faster: str, other: Callable[[], Any], rounds: int) -> Any:
    """Prints how many times the CPU seconds of `other` are those of `one`. Returns what `other` returned last."""
    ratios = []
    found = None
    for _ in range(rounds):
        one_s, _ = timed(one)
        other_s, found = timed(other)
        ratios.append(one_s / other_s)
        print(f"{slower} {one_s:.2f} CPU s, {faster} {other_s:.2f} CPU s: {ratios[-1]:.2f}", flush=True)
    print(f"median over {rounds} rounds: {statistics.median(ratios):.2f}")
    return found


def engine_of(source: Any, slots: int, ngrams: int | None = None) -> Any:
    return open_engine(
        source, slots=slots, max_len=LONGEST_PROMPT + LONGEST_ANSWER, chunk=LONGEST_PROMPT, max_queue=NUM_REQUESTS,
        ngrams=ngrams,
    )  # fmt: skip


def random_llama(folder: Path) -> Path:
    """A Hugging Face folder with random weights, on which the time of a token does not depend."""
    model = Llama(num_layers=4, hidden_size=256, num_heads=8, intermediate_size=704, vocab_size=1024)
    export(folder, model, flatten_with_paths(nnx.to_pure_dict(nnx.state(model.build(nnx.Rngs(0)), nnx.Param))))
    return folder


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds, and what `work` returns."""
    begin = time.process_time()
    found = work()
    return time.process_time() - begin, found


if __name__ == "__main__":
    main()
