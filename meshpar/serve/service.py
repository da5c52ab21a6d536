"""Answers requests while they arrive: the loop between the scheduler, the engine and the tasks that wait for answers.

The scheduler runs in the event loop, so nothing is locked. The engine computes a turn in a thread, and meanwhile the
loop accepts and cancels requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from meshpar.data.tokenizer import Tokenizer
from meshpar.errors import RunError
from meshpar.serve.answer import Answer, AnswerPiece, Finish
from meshpar.serve.engine import Engine
from meshpar.serve.scheduler import Request, Scheduler


class Observer:
    """Receives the events of a service. This one ignores them."""

    def first_token(self, seconds: float) -> None:
        """The first token of an answer, and the time since its request."""

    def next_token(self, seconds: float) -> None:
        """A later token of an answer, and the time since the one before."""

    def checked(self, num_drafts: int, num_accepted: int) -> None:
        """Drafts that the model checked in a turn, and how many of them it accepted."""

    def ended(self, finish: Finish | Literal["cancelled"]) -> None:
        """The end of an answer."""


class GrammarError(RunError):
    """The grammar of a request became too complex while its answer was written."""


class UnavailableError(Exception):
    """The service accepts no requests: it is shutting down, or it has failed."""


@dataclass(eq=False)
class Answers:
    """The answers to requests that were submitted together, in their order.

    Args:
      last_s: when each answer got its newest token; before the first one, when the request was submitted.
      per_prompt: how many requests in a row have the same prompt.
      num_reused: how many tokens of the prompts were in the cache already.
    """

    service: Service
    requests: list[Request]
    answers: list[Answer]
    last_s: list[float]
    per_prompt: int = 1
    num_reused: int = 0
    pieces: asyncio.Queue[AnswerPiece | Exception] = field(default_factory=asyncio.Queue)

    async def stream(self) -> AsyncIterator[AnswerPiece]:
        """Yields each piece when it is computed; `row` is the index of its request. If closed, it cancels the answers.

        Raises:
          UnavailableError: the service failed.
          GrammarError: the grammar of an answer became too complex.
        """
        try:
            missing = len(self.requests)
            while missing:
                piece = await self.pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                missing -= piece.finish is not None
                yield piece
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Ends incomplete answers, and releases their pages."""
        for request in self.requests:
            self.service.cancel(request)


class Service:
    """Answers requests, in the order in which they arrive.

    Args:
      engine: computes turns.
      ends: ids that end an answer, see `Answer`.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, observer: Observer | None = None,
        ends: Collection[int] | None = None,
    ):  # fmt: skip
        self.scheduler = Scheduler(engine.decoding.capacity)
        self.is_draining = False
        self.failure: Exception | None = None
        self._engine = engine
        self._tokenizer = tokenizer
        self._ends = ends
        self._observer = observer or Observer()
        self._running: dict[Request, tuple[Answers, int]] = {}
        self._submitted = asyncio.Event()
        self._ended = asyncio.Event()
        self.failed = asyncio.Event()

    @property
    def status(self) -> Literal["ok", "draining", "failed"]:
        if self.failure:
            return "failed"
        return "draining" if self.is_draining else "ok"

    def submit(
        self, requests: Sequence[Request], stop: Sequence[str] = (), per_prompt: int = 1, ends: Collection[int] = (),
        kept: Collection[int] = (),
    ) -> Answers:  # fmt: skip
        """Adds requests to the queue, all or none.

        Args:
          stop: texts before which each answer ends.
          per_prompt: see `Answers`.
          ends: ids that end each answer, besides those of the model.
          kept: see `Answer`.

        Raises:
          QueueFullError: they do not fit into the queue.
          UnavailableError: the service is shutting down, or has failed.
        """
        if self.status != "ok":
            raise UnavailableError(f"the server is {self.status}")
        self.scheduler.submit(requests)
        own = (self._tokenizer.bos, self._tokenizer.eos) if self._ends is None else self._ends
        answers = [Answer(self._tokenizer, stop, one.max_tokens, {*own, *ends}, one.prompt, kept) for one in requests]
        group = Answers(self, list(requests), answers, [time.perf_counter()] * len(requests), per_prompt)
        self._running.update({request: (group, i) for i, request in enumerate(requests)})
        self._submitted.set()
        return group

    def cancel(self, request: Request) -> None:
        """Ends a request, if it has not ended."""
        if request in self._running:
            self._end(request, "cancelled")

    async def run(self) -> None:
        """Computes turns until it is cancelled.

        Raises:
          Exception: a turn failed. The clients of all requests receive an error.
        """
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "engine") as thread:
            while True:
                plan = self.scheduler.plan()
                if plan.is_empty:
                    self._submitted.clear()
                    await self._submitted.wait()
                    continue
                try:
                    computed = await loop.run_in_executor(thread, self._engine.run, plan)
                    self._observer.checked(computed.num_drafts, computed.num_accepted)
                    for sampled in self.scheduler.advance(plan, computed):
                        if sampled.request in self._running:  # a stop string may have ended it earlier in this turn
                            self._deliver(*sampled)
                except Exception as error:
                    self._fail(error)
                    raise

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Service]:
        """Computes turns until its end."""
        task = asyncio.create_task(self.run())
        try:
            yield self
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):  # if it failed, its clients have received an error
                await task

    async def drain(self) -> None:
        """Refuses new requests, and waits until the others are answered."""
        self.is_draining = True
        while self._running:
            self._ended.clear()
            await self._ended.wait()

    def _deliver(self, request: Request, token: int, score: Any) -> None:
        group, i = self._running[request]
        answer = group.answers[i]
        now = time.perf_counter()
        if not answer.tokens:
            row = self.scheduler.row_of(request)
            answer.prompt_scores = row.prompt_scores if row else []
            group.num_reused += row.num_reused if row and not i % group.per_prompt else 0
            self._observer.first_token(now - group.last_s[i])
        else:
            self._observer.next_token(now - group.last_s[i])
        group.last_s[i] = now
        text = answer.add(token, score)
        if request.constraint and (problem := request.constraint.error):
            self._end(request, "cancelled")
            group.pieces.put_nowait(GrammarError(f"the grammar cannot be followed any more: {problem}"))
            return
        if answer.finish:
            self._end(request, answer.finish)
        group.pieces.put_nowait(AnswerPiece(i, text, answer.finish, len(answer.tokens)))

    def _end(self, request: Request, finish: Finish | Literal["cancelled"]) -> None:
        self.scheduler.end(request)
        del self._running[request]
        self._ended.set()
        self._observer.ended(finish)

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self.failed.set()
        for request, (group, _) in list(self._running.items()):
            self._end(request, "cancelled")
            group.pieces.put_nowait(UnavailableError("the server has failed"))
