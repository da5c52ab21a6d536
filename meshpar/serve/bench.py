"""Measures a server on this machine under growing load, beside generation in batches and of one prompt at a time.

All three answer the same prompts, of mixed lengths, with the same numbers of tokens.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from meshpar.data.tokenizer import Ids
from meshpar.serve.answer import Answer
from meshpar.serve.batch import Batch
from meshpar.serve.engine import Engine
from meshpar.serve.open_engine import open_batch
from meshpar.serve.paged_model import GREEDY
from meshpar.serve.sampling import Sampling
from meshpar.serve.scheduler import Request
from meshpar.serve.service import Observer, Service
from meshpar.serve.source import Source


@dataclass(frozen=True)
class Workload:
    """Prompts of random tokens.

    Args:
      prompts: their lengths are uniform between 1 and the longest.
      lengths: the numbers of tokens of the answers, from an exponential distribution that is cut at the longest.
    """

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def num_tokens(self) -> int:
        """The tokens of all answers."""
        return sum(self.lengths)

    def cut(self, num: int) -> Workload:
        """The first prompts."""
        return Workload(self.prompts[:num], self.lengths[:num])


def draw(num: int, vocab_size: int, longest_prompt: int, longest_answer: int, seed: int = 0) -> Workload:
    """Draws a workload."""
    drawn = np.random.default_rng(seed)
    sizes = drawn.integers(1, longest_prompt + 1, num)
    lengths = np.ceil(drawn.exponential(longest_answer / 5, num)).clip(1, longest_answer)
    return Workload([drawn.integers(0, vocab_size, n).tolist() for n in sizes], lengths.astype(int).tolist())


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
    first_s: tuple[float, float] | None = None
    between_s: tuple[float, float] | None = None
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
        head = f"{'':<16}{'requests/s':>11}{'tokens/s':>10}{'first token, ms':>24}{'between tokens, ms':>24}"
        lines = [self.what, "", head, f"{'':<37}{'median':>12}{'90 %':>12}{'median':>12}{'90 %':>12}"]
        for load in self.loads:
            rate = f"{load.rate:g}" if math.isfinite(load.rate) else "all"
            times = [f"{1000 * x:.1f}" for pair in (load.first_s, load.between_s) if pair for x in pair]
            row = f"{load.name:<16}{rate:>11}{load.tokens_per_s:>10.0f}" + "".join(f"{text:>12}" for text in times)
            lines.append(row if load.acceptance is None else f"{row}  {load.acceptance:.0%} of drafts accepted")
        return "\n".join([*lines, "", f"server over batches: {self.continuous_over_static:.2f} times the tokens/s"])


def bench(engine: Engine, source: Source, workload: Workload, rates: Sequence[float]) -> ServeBench:
    """Measures the rates in their order, then all requests at once, batches, and one prompt at a time.

    Args:
      rates: mean requests per second. They arrive as a Poisson process.
    """
    loads = [asyncio.run(serve(engine, workload, rate)) for rate in (*rates, math.inf)]
    num_rows = engine.decoding.capacity.num_rows
    loads.append(generate("batches", batch_engine(source, workload, num_rows), workload, num_rows))
    few = workload.cut(max(1, len(workload.prompts) // 4))
    loads.append(generate("one by one", batch_engine(source, few, 1), few, 1))
    return ServeBench(f"{len(workload.prompts)} requests, {workload.num_tokens} tokens; {engine}", tuple(loads))


class Drafts(Observer):
    """Counts drafts."""

    num = 0
    num_accepted = 0

    def checked(self, num_drafts: int, num_accepted: int) -> None:
        self.num += num_drafts
        self.num_accepted += num_accepted

    @property
    def acceptance(self) -> float | None:
        """The fraction that was accepted; None if there was none."""
        return self.num_accepted / self.num if self.num else None


async def serve(engine: Engine, workload: Workload, rate: float, sampling: Sampling = GREEDY) -> Load:
    """Answers requests that arrive at a rate."""
    drafts = Drafts()
    async with _running(engine, drafts) as service:
        gaps = np.random.default_rng(1).exponential(1, len(workload.prompts)) / rate
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
        arrivals = begin + np.cumsum(gaps)
        await asyncio.gather(*map(ask, range(len(arrivals)), workload.prompts, workload.lengths, arrivals))
        tokens_per_s = workload.num_tokens / (time.perf_counter() - begin)
        return Load("server", rate, tokens_per_s, _percentiles(first), _percentiles(between), drafts.acceptance)


@asynccontextmanager
async def _running(engine: Engine, observer: Observer) -> AsyncIterator[Service]:
    """A service whose answers end by their length alone."""
    capacity = engine.decoding.capacity
    service = Service(engine, capacity, _no_end(engine.decoding.vocab_size), observer)
    task = asyncio.create_task(service.run())
    yield service
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def batch_engine(source: Source, workload: Workload, num_rows: int) -> Engine:
    """The engine of `generate` for batches of so many rows, of the workload's longest prompt and answer."""
    longest = max(map(len, workload.prompts))
    return open_batch(source, GREEDY, num_rows=num_rows, longest=longest, max_tokens=max(workload.lengths))


def generate(name: str, engine: Engine, workload: Workload, num_rows: int) -> Load:
    """Answers one batch after the other; each goes on until its longest answer ends."""
    tokenizer = _no_end(engine.decoding.vocab_size)
    first: list[float] = []
    between: list[float] = []
    for begin in range(0, len(workload.prompts), num_rows):
        rows = slice(begin, begin + num_rows)
        requests = [
            Request(prompt=prompt, max_tokens=length, sampling=GREEDY, index=i)
            for i, (prompt, length) in enumerate(zip(workload.prompts[rows], workload.lengths[rows], strict=True))
        ]
        batch = Batch([Answer(tokenizer, [], request.max_tokens) for request in requests])
        for _ in batch.stream(engine, requests):
            pass
        first.append(sum(batch.prefill_s))
        between.extend(batch.decode_s)
    tokens_per_s = workload.num_tokens / (sum(first) + sum(between))
    return Load(name, math.inf, tokens_per_s, _percentiles(first), _percentiles(between))


def _no_end(vocab_size: int) -> Ids:
    """A tokenizer whose end of a document no model can sample."""
    return Ids(vocab_size=vocab_size + 1, bos=vocab_size)


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    median, high = np.percentile(seconds or [0.0], [50, 90])
    return float(median), float(high)
