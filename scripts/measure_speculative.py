"""Measures speculative decoding of the quickstart's model: accepted drafts, tokens per step, and time.

    python scripts/compare_compression.py runs/compression train base draft
    python scripts/measure_speculative.py runs/compression

Time is process CPU seconds, the median of interleaved batches, over that of decoding one token at a time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from meshpar.data.tokenizer import Ids
from meshpar.serve.answer import Answer
from meshpar.serve.batch import Batch, requests_of
from meshpar.serve.open_engine import open_batch
from meshpar.serve.sampling import Sampling
from meshpar.serve.source import open_source

TEXTS = [
    "def __init__(self, name, value):",
    "    for i in range(len(self.items",
    "import os\nimport sys\nimport re\n",
]
NO_END = Ids(vocab_size=2**20, bos=2**20 - 1)
ROWS, PROMPT, TOKENS = 3, 32, 192
ONE_DEVICE = ["mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1", "rules=replicated"]
SAMPLINGS = {"greedy": Sampling(), "temperature 0.8": Sampling(temperature=0.8, seed=1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num-drafts", type=int, default=4)
    arguments = parser.parse_args()
    large = open_source(arguments.folder / "base", ONE_DEVICE)
    small = open_source(arguments.folder / "draft", ONE_DEVICE)
    prompts = [list(text.encode()[:PROMPT]) for text in TEXTS]
    sizes = {"num_rows": ROWS, "longest": PROMPT, "max_tokens": TOKENS, "num_drafts": arguments.num_drafts}
    drafts = {"none": {}, "2-grams": {"ngrams": 2}, "a smaller model": {"draft": small}}
    print("| | drafts | accepted | tokens of a step | CPU time of a token | same answers |\n|---|---|---|---|---|---|")
    for name, sampling in SAMPLINGS.items():
        engines = {kind: open_batch(large, sampling, **sizes, **how) for kind, how in drafts.items()}
        times: dict[str, list[float]] = {kind: [] for kind in engines}
        batches: dict[str, Batch] = {}
        for _ in range(3):
            for kind, engine in engines.items():
                batch = Batch([Answer(NO_END, [], TOKENS) for _ in prompts])
                start = time.process_time()
                for _ in batch.stream(engine, requests_of(prompts, TOKENS, sampling)):
                    pass
                times[kind].append(time.process_time() - start)
                batches[kind] = batch
        answers = {kind: [answer.tokens for answer in batch.answers] for kind, batch in batches.items()}
        for kind, batch in batches.items():
            same = "yes" if answers[kind] == answers["none"] else "no"
            rate = f"{batch.acceptance:.2f}" if drafts[kind] else ""
            ratio = statistics.median(times[kind]) / statistics.median(times["none"])
            steps = (TOKENS - 1) / len(batch.decode_s)
            print(f"| {name} | {kind} | {rate} | {steps:.2f} | {ratio:.2f} | {same} |", flush=True)


if __name__ == "__main__":
    main()
