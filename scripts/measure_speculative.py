"""Measures speculative decoding of the quickstart's model: accepted drafts, tokens per step, and time.

    python scripts/compare_compression.py runs/compression train base draft
    python scripts/measure_speculative.py runs/compression

Time is process CPU seconds, the median of interleaved batches, over that of decoding one token at a time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from meshpar.serve.decoding import Decoding
from meshpar.serve.generator import Generator
from meshpar.serve.sampling import Sampling
from meshpar.serve.source import open_source
from meshpar.serve.speculative import DraftModel, PromptLookup, SpeculativeGenerator

TEXTS = [
    "def __init__(self, name, value):",
    "    for i in range(len(self.items",
    "import os\nimport sys\nimport re\n",
]
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
    ctx = large.ctx(large.run.mesh.build())
    prompts = [list(text.encode()[:PROMPT]) for text in TEXTS]
    print("| | drafts | accepted | tokens of a step | CPU time of a token | same answers |\n|---|---|---|---|---|---|")
    for name, sampling in SAMPLINGS.items():
        plain = Decoding(
            model=large.model, ctx=ctx, dtype=np.dtype("float32"), sampling=sampling, num_rows=ROWS,
            prompt_len=PROMPT, max_tokens=TOKENS,
        )  # fmt: skip
        own = replace(plain, num_drafts=arguments.num_drafts)
        drafters = {"2-grams": PromptLookup(own, 2), "a smaller model": DraftModel(replace(own, model=small.model))}
        generators: dict[str, Generator] = {"none": Generator(plain, large.restore)}
        for kind, drafter in drafters.items():
            restore = small.restore if isinstance(drafter, DraftModel) else lambda structs: structs
            generators[kind] = SpeculativeGenerator(own, large.restore, drafter=drafter, restore_draft=restore)
        times: dict[str, list[float]] = {kind: [] for kind in generators}
        steps: dict[str, int] = {}
        answers: dict[str, list[list[int]]] = {}
        for _ in range(3):
            for kind, generator in generators.items():
                start = time.process_time()
                turns = list(generator.lists(prompts))
                times[kind].append(time.process_time() - start)
                steps[kind] = len(turns) - 1
                answers[kind] = [[token for new in row for token in new] for row in zip(*turns, strict=True)]
        for kind, generator in generators.items():
            same = "yes" if answers[kind] == answers["none"] else "no"
            rate = "" if generator.acceptance is None else f"{generator.acceptance:.2f}"
            ratio = statistics.median(times[kind]) / statistics.median(times["none"])
            print(f"| {name} | {kind} | {rate} | {(TOKENS - 1) / steps[kind]:.2f} | {ratio:.2f} | {same} |", flush=True)


if __name__ == "__main__":
    main()
