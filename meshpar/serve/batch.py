"""Answers a batch of prompts with an engine, without a server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from meshpar.serve.answer import Answer, AnswerPiece
from meshpar.serve.engine import Engine
from meshpar.serve.sampling import Sampling
from meshpar.serve.scheduler import Computed, Request, Scheduler, TurnPlan


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

    def stream(self, engine: Engine, requests: Sequence[Request]) -> Iterator[AnswerPiece]:
        """Answers requests, as many at a time as the engine has room for; yields a piece for each token.

        A turn may add tokens to an answer that ends before them: they are left out.
        """
        capacity = engine.decoding.capacity
        scheduler = Scheduler(replace(capacity, max_queue=max(capacity.max_queue, len(requests))))
        scheduler.submit(requests)
        places = {request: row for row, request in enumerate(requests)}
        for request, token, score in scheduler.answered(lambda plan: self._timed(engine, plan)):
            place, row = places[request], scheduler.row_of(request)
            answer = self.answers[place]
            if row:
                answer.prompt_scores = row.prompt_scores
            yield AnswerPiece(place, answer.add(token, score), answer.finish)
            if answer.finish is not None:
                scheduler.end(request)

    def _timed(self, engine: Engine, plan: TurnPlan) -> Computed:
        has_begun = all(answer.tokens or answer.finish for answer in self.answers)
        start = time.perf_counter()
        computed = engine.run(plan)
        (self.decode_s if has_begun else self.prefill_s).append(time.perf_counter() - start)
        self.num_drafts += computed.num_drafts
        self.num_accepted += computed.num_accepted
        return computed


def requests_of(prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Sampling) -> list[Request]:
    """The prompts of one batch, numbered in their order."""
    return [Request(prompt=x, max_tokens=max_tokens, sampling=sampling, index=i) for i, x in enumerate(prompts)]
