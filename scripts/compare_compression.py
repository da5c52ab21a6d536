"""Compares size, speed and held-out loss of the quickstart's model under each compression, and under combinations.

    python scripts/compare_compression.py runs/compression train base longer half two_of_four
    python scripts/compare_compression.py runs/compression measure

`train` trains the named runs: the quickstart; a smaller model; and 60 more steps from the quickstart's end, dense or
with pruning. `measure` compresses and compares the named variants; default: all. The loss is that of the first eight
held-out batches, through the cache. Time is process CPU seconds of decoding on one device, the median of interleaved
batches.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar import Quantized, compress, fit, load
from meshpar.data.tokenizer import Ids
from meshpar.serve.answer import Answer
from meshpar.serve.batch import Batch, requests_of
from meshpar.serve.open_engine import open_batch
from meshpar.serve.paged_decoding import PagedDecoding
from meshpar.serve.sampling import Sampling
from meshpar.serve.scheduler import Capacity
from meshpar.serve.source import open_source
from meshpar.train.program import structs

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
ONE_DEVICE = ["mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1", "rules=replicated", "loggers=[]"]
PRUNE = "every: 6, times: 6"
LONGER = ["num_steps=60", "optim.lr=2e-3", "optim.schedule.warmup_steps=5"]
RUNS = {
    "base": [],
    "draft": ["model.num_layers=1", "model.hidden_size=32", "model.num_heads=4", "model.num_kv_heads=4"],
    "longer": LONGER,
    "half": [*LONGER, f"prune={{kind: magnitude, sparsity: 0.5, {PRUNE}}}"],
    "two_of_four": [*LONGER, f"prune={{kind: n_of_m, n: 2, m: 4, {PRUNE}}}"],
}
INT8 = {"weights": Quantized(kind="int8", group=32)}
INT4 = {"weights": Quantized(kind="int4", group=32)}
LOW_RANK = {"low_rank_error": 0.3}
VARIANTS = {
    "float32": ("base", {}, None),
    "int8 weights": ("base", INT8, None),
    "int4 weights": ("base", INT4, None),
    "int8 cache": ("base", {}, "int8"),
    "low rank, error 0.3": ("base", LOW_RANK, None),
    "int8 weights, int8 cache": ("base", INT8, "int8"),
    "int4 weights, int8 cache": ("base", INT4, "int8"),
    "low rank, int8 weights": ("base", LOW_RANK | INT8, None),
    "low rank, int8 weights, int8 cache": ("base", LOW_RANK | INT8, "int8"),
    "60 more steps": ("longer", {}, None),
    "half of the weights pruned": ("half", {}, None),
    "2 of 4 pruned": ("two_of_four", {}, None),
    "60 more steps, int8 weights": ("longer", INT8, None),
    "half of the weights pruned, int8 weights": ("half", INT8, None),
    "2 of 4 pruned, int8 weights": ("two_of_four", INT8, None),
    "2 of 4 pruned, int8 weights, int8 cache": ("two_of_four", INT8, "int8"),
}
NO_END = Ids(vocab_size=2**20, bos=2**20 - 1)
ROWS, PROMPT, TOKENS, ROUNDS = 8, 32, 64, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("verb", choices=["train", "measure"])
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    if arguments.verb == "train":
        for name in arguments.names or RUNS:
            begin = [] if name in ("base", "draft") else [f"init.from_checkpoint={arguments.folder / 'base'}"]
            keys = [*ONE_DEVICE, *RUNS[name], *begin, "checkpoints=20", f"run_dir={arguments.folder / name}"]
            fit(load(CONFIG, keys), json=True)
        return
    names = dict.fromkeys(["float32", *(arguments.names or VARIANTS)])
    measured: dict[str, Measured] = {}
    for name in names:
        measured[name] = Measured(arguments.folder, *VARIANTS[name])
        print(f"{name}: {measured[name].num_bytes} B, loss {measured[name].loss:.4f}", file=sys.stderr, flush=True)
    order = list(measured.values())
    for _ in range(ROUNDS):
        for one in order:
            one.decode()
        order.append(order.pop(0))  # none is always the first
    plain = measured["float32"]
    print("| | parameters | of float32 | cache | held-out loss | CPU time of a token |\n|---|---|---|---|---|---|")
    for name, one in measured.items():
        size = f"{one.num_bytes:,} B | {one.num_bytes / plain.num_bytes:.3f} | {one.cache_bytes:,} B"
        print(f"| {name} | {size} | {one.loss:.4f} | {one.seconds / plain.seconds:.2f} |", flush=True)


class Measured:
    """One variant: the bytes that it holds, its held-out loss, and its programs for decoding."""

    def __init__(self, folder: Path, run: str, how: dict, cache: str | None):
        there = folder / run
        if how:
            there = folder / "-".join([run, *(str(value).replace(" ", "_") for value in how.values())])
            if not there.exists():
                with redirect_stdout(io.StringIO()):
                    compress(folder / run, there, **how)
        source = open_source(there, ONE_DEVICE)
        precision = source.run.precision.model_copy(update={"params": "float32", "cache": cache})
        source = replace(source, run=source.run.model_copy(update={"precision": precision}))
        self.engine = engine = open_batch(source, Sampling(), num_rows=ROWS, longest=PROMPT, max_tokens=TOKENS)
        self.cache_bytes = engine.decoding.cache_bytes
        params = source.restore(structs(engine.decoding.params))
        self.num_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
        held_out = source.run.data.datasets(source.run.seed)[1]
        self.loss = loss_of(engine.decoding, params, list(islice(held_out.batches(), 8)))
        self.times: list[float] = []

    @property
    def seconds(self) -> float:
        return statistics.median(self.times)

    def decode(self) -> None:
        prompt = np.frombuffer(b"def __init__(self, name, value):\n"[:PROMPT], np.uint8).tolist()
        batch = Batch([Answer(NO_END, [], TOKENS) for _ in range(ROWS)])
        start = time.process_time()
        for _ in batch.stream(self.engine, requests_of([prompt] * ROWS, TOKENS, Sampling())):
            pass
        self.times.append(time.process_time() - start)


def loss_of(decoding: PagedDecoding, params: Any, batches: Sequence[dict[str, np.ndarray]]) -> float:
    """The mean loss of a token. Tokens attend to cached keys and values, and each row is one text."""
    num_rows, length = batches[0]["tokens"].shape
    decoding = replace(decoding, capacity=Capacity.of_rows(1, num_rows, length, chunk=length, all_prompts=True))
    empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), structs(decoding.cache))
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (num_rows, length))
    rows = {"positions": positions, "last": positions, "rows": jnp.arange(num_rows, dtype=jnp.int32)}

    @jax.jit
    def costs(tokens: jax.Array, targets: jax.Array) -> jax.Array:
        logits, _ = decoding.logits(params, rows | {"tokens": tokens}, empty)
        each = optax.softmax_cross_entropy_with_integer_labels(logits[..., : decoding.model.vocab_size], targets)
        return jnp.where(targets >= 0, each, 0).sum()

    total = sum(float(costs(batch["tokens"], batch["targets"])) for batch in batches)
    return total / sum(int((batch["targets"] >= 0).sum()) for batch in batches)


if __name__ == "__main__":
    main()
