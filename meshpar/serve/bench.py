"""Measures a server on this machine under growing load, beside generation in batches and of one prompt at a time.

All three answer the same prompts, of mixed lengths, with the same numbers of tokens.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from meshpar.data.tokenizer import Ids
from meshpar.inspection.report.table import table
from meshpar.serve.answer import Answer
from meshpar.serve.batch import Batch
from meshpar.serve.engine import Engine
from meshpar.serve.open_engine import open_batch
from meshpar.serve.paged_model import GREEDY
from meshpar.serve.sampling import Sampling
from meshpar.serve.scheduler import Request
from meshpar.serve.service import Observer, Service
from meshpar.serve.source import Source

Workload = Sequence[tuple[list[int], int]]
"""Prompts of random tokens, and the numbers of tokens of their answers."""


def draw(num: int, vocab_size: int, longest_prompt: int, longest_answer: int, seed: int = 0) -> Workload:
    """Draws a workload.

    The lengths of prompts are uniform between 1 and the longest, those of answers from an exponential distribution that
    is cut at the longest.
    """
    drawn = np.random.default_rng(seed)
    sizes = drawn.integers(1, longest_prompt + 1, num)
    lengths = np.ceil(drawn.exponential(longest_answer / 5, num)).clip(1, longest_answer)
    prompts = [drawn.integers(0, vocab_size, n).tolist() for n in sizes]
    return list(zip(prompts, lengths.astype(int).tolist(), strict=True))


def num_tokens(workload: Workload) -> int:
    """The tokens of all answers."""
    return sum(length for _, length in workload)


@dataclass(frozen=True)
class Load:
    """How a workload was answered.

    Args:
      name: what answered it: `server`, `batches` or `one by one`.
      rate: requests per second; infinite if all wait at the beginning.
      tokens_per_s: tokens of answers per second.
      first_s: seconds from a request to its first token: median and 90th percentile. Without a server the time in
        which a prompt waits for those before it is not included.
      between_s: seconds from a token to the next of the same answer: median and 90th percentile.
      acceptance: the fraction of drafts that the model accepted; None without drafts.
    """

    name: str
    rate: float
    tokens_per_s: float
    first_s: tuple[float, float]
    between_s: tuple[float, float]
    acceptance: float | None = None


@dataclass(frozen=True)
class ServeBench:
    """The measurements, and what was measured.

    Args:
      what: model, mesh and sizes.
    """

    what: str
    loads: tuple[Load, ...]

    def load(self, name: str) -> Load:
        """The last load with this name."""
        return next(load for load in reversed(self.loads) if load.name == name)

    @property
    def continuous_over_static(self) -> float:
        """The tokens per second of the server over those of batches, where all requests wait at the beginning."""
        return self.load("server").tokens_per_s / self.load("batches").tokens_per_s

    def as_json(self) -> dict[str, Any]:
        loads = [asdict(load) | {"rate": load.rate if math.isfinite(load.rate) else None} for load in self.loads]
        return {"what": self.what, "loads": loads, "continuous_over_static": self.continuous_over_static}

    def __str__(self) -> str:
        head = ["", "requests/s", "tokens/s", "first token, ms", "90 %", "between tokens, ms", "90 %", ""]
        rows: list[list[str]] = []
        for load in self.loads:
            rate = f"{load.rate:g}" if math.isfinite(load.rate) else "all"
            times = [f"{1000 * x:.1f}" for x in (*load.first_s, *load.between_s)]
            accepted = "" if load.acceptance is None else f"{load.acceptance:.0%} of drafts accepted"
            rows.append([load.name, rate, f"{load.tokens_per_s:.0f}", *times, accepted])
        over = f"server over batches: {self.continuous_over_static:.2f} times the tokens/s"
        return "\n".join([self.what, "", table(head, rows), "", over])


def bench(engine: Engine, source: Source, workload: Workload, rates: Sequence[float]) -> ServeBench:
    """Measures the rates in their order, then all requests at once, batches, and one prompt at a time.

    Args:
      rates: mean requests per second. They arrive as a Poisson process.
    """
    loads = [asyncio.run(serve(engine, workload, rate)) for rate in (*rates, math.inf)]
    num_rows = engine.decoding.capacity.num_rows
    loads.append(generate("batches", batch_engine(source, workload, num_rows), workload, num_rows))
    few = workload[: max(1, len(workload) // 4)]
    loads.append(generate("one by one", batch_engine(source, few, 1), few, 1))
    return ServeBench(f"{len(workload)} requests, {num_tokens(workload)} tokens; {engine}", tuple(loads))


class Drafts(Observer):
    """Counts drafts."""

    num = 0
    num_accepted = 0

    def checked(self, num_drafts: int, num_accepted: int) -> None:
        self.num += num_drafts
        self.num_accepted += num_accepted


async def serve(engine: Engine, workload: Workload, rate: float, sampling: Sampling = GREEDY) -> Load:
    """Answers requests that arrive at a rate."""
    drafts = Drafts()
    async with Service(engine, _no_end(engine), drafts).running() as service:
        first: list[float] = []
        between: list[float] = []

        async def ask(index: int, prompt: list[int], num_tokens: int, at: float) -> None:
            await asyncio.sleep(at - time.perf_counter())
            last = time.perf_counter()
            times: list[float] = []
            request = Request(prompt=prompt, max_tokens=num_tokens, sampling=sampling, index=index)
            async for _ in service.submit([request]).stream():
                now = time.perf_counter()
                times.append(now - last)
                last = now
            first.append(times[0])
            between.extend(times[1:])

        begin = time.perf_counter()
        arrivals = begin + np.cumsum(np.random.default_rng(1).exponential(1, len(workload)) / rate)
        await asyncio.gather(*(ask(i, *one, at) for i, (one, at) in enumerate(zip(workload, arrivals, strict=True))))
        tokens_per_s = num_tokens(workload) / (time.perf_counter() - begin)
        acceptance = drafts.num_accepted / drafts.num if drafts.num else None
        return Load("server", rate, tokens_per_s, _percentiles(first), _percentiles(between), acceptance)


def batch_engine(source: Source, workload: Workload, num_rows: int) -> Engine:
    """The engine of `generate` for batches of so many rows, of the workload's longest prompt and answer."""
    longest, most = max(len(prompt) for prompt, _ in workload), max(length for _, length in workload)
    return open_batch(source, GREEDY, num_rows=num_rows, longest=longest, max_tokens=most)


def generate(name: str, engine: Engine, workload: Workload, num_rows: int) -> Load:
    """Answers one batch after the other; each goes on until its longest answer ends."""
    first: list[float] = []
    between: list[float] = []
    for begin in range(0, len(workload), num_rows):
        requests = [
            Request(prompt=prompt, max_tokens=length, sampling=GREEDY, index=i)
            for i, (prompt, length) in enumerate(workload[begin : begin + num_rows])
        ]
        batch = Batch([Answer(_no_end(engine), [], request.max_tokens) for request in requests])
        _ = list(batch.stream(engine, requests))
        first.append(sum(batch.prefill_s))
        between.extend(batch.decode_s)
    tokens_per_s = num_tokens(workload) / (sum(first) + sum(between))
    return Load(name, math.inf, tokens_per_s, _percentiles(first), _percentiles(between))


def _no_end(engine: Engine) -> Ids:
    """A tokenizer whose end of a document no model can sample, so that answers end by their length alone."""
    vocab_size = engine.decoding.vocab_size
    return Ids(vocab_size=vocab_size + 1, bos=vocab_size)


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    median, high = np.percentile(seconds or [0.0], [50, 90])
    return float(median), float(high)
