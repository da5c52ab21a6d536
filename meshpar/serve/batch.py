"""Answers a batch of prompts with an engine, without a server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from meshpar.serve.answer import Answer, AnswerPiece
from meshpar.serve.sampling import Sampling
from meshpar.serve.scheduler import Computed, Request, Scheduler, TurnPlan


class BatchEngine(Protocol):
    """An `Engine`, or an `OwnEngine`."""

    decoding: Any

    def run(self, plan: TurnPlan) -> Computed:
        """Computes a turn."""
        ...


@dataclass
class Batch:
    """The answers to a batch of prompts, and what they took.

    Args:
      answers: `stream` fills them.
      prefill_s: seconds of each turn until each row had its first token.
      decode_s: seconds of each later turn.
      num_drafts, num_accepted: drafts that were checked, and those of them that the model sampled too.
    """

    answers: Sequence[Answer]
    prefill_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    num_drafts: int = 0
    num_accepted: int = 0

    @property
    def acceptance(self) -> float:
        """The fraction of drafts that were accepted."""
        return self.num_accepted / self.num_drafts if self.num_drafts else 0.0

    def stream(self, engine: BatchEngine, requests: Sequence[Request]) -> Iterator[AnswerPiece]:
        """Answers requests, all of which the engine has room for; yields a piece for each token.

        A turn may add tokens to an answer that ends before them: they are left out.
        """
        rows = {id(request): row for row, request in enumerate(requests)}
        scheduler = Scheduler(engine.decoding.capacity)
        scheduler.submit(requests)
        while not scheduler.is_idle:
            has_begun = all(answer.tokens or answer.finish for answer in self.answers)
            start = time.perf_counter()
            plan = scheduler.plan()
            computed = engine.run(plan)
            (self.decode_s if has_begun else self.prefill_s).append(time.perf_counter() - start)
            self.num_drafts += computed.num_drafts
            self.num_accepted += computed.num_accepted
            for one in scheduler.advance(plan, computed):
                row = rows[id(one.request)]
                answer = self.answers[row]
                if answer.finish is None:
                    yield AnswerPiece(row, answer.add(one.token), answer.finish)
                if answer.finish is not None:
                    scheduler.end(one.request)


def requests_of(prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Sampling) -> list[Request]:
    """The prompts of one batch, numbered in their order."""
    return [Request(prompt=x, max_tokens=max_tokens, sampling=sampling, index=i) for i, x in enumerate(prompts)]
