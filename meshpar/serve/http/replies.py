"""Sends answers: complete, or as they are computed, until the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from meshpar.serve.http.errors import ApiError
from meshpar.serve.http.shapes import Shape
from meshpar.serve.service import Answers, GrammarError, UnavailableError


async def complete(http: Request, answers: Answers) -> None:
    """Waits for all answers, or until the client disconnects."""

    async def read() -> None:
        async for _ in answers.stream():
            pass

    async def disconnected() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        raise ClientDisconnect

    tasks = [asyncio.create_task(read()), asyncio.create_task(disconnected())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done.pop().result()
    finally:
        answers.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(StreamingResponse):
    """Server-sent events: one for each piece that has text or ends an answer.

    Args:
      with_usage: whether the last event has the numbers of tokens.
    """

    def __init__(self, answers: Answers, shape: Shape, with_usage: bool):
        self.answers = answers
        self.shape = shape
        self.with_usage = with_usage
        super().__init__(self._events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # the client may disconnect before the first event
            self.answers.cancel()

    async def _events(self) -> AsyncIterator[str]:
        for i in range(len(self.answers.requests)):
            for choice in self.shape.opening(i):
                yield self._part([choice])
        try:
            sent = [0] * len(self.answers.requests)  # tokens of each answer
            async for piece in self.answers.stream():
                if piece.text or piece.finish:
                    delta = self.shape.delta(piece, self.answers, sent[piece.row])
                    sent[piece.row] = piece.num_tokens
                    yield self._part([delta])
        except UnavailableError as error:
            yield _event(ApiError(503, str(error)).body)
            return
        except GrammarError as error:
            yield _event(ApiError(400, str(error)).body)
            return
        if self.with_usage:
            yield _event(self.shape.event([]) | {"usage": usage(self.answers)})
        yield "data: [DONE]\n\n"

    def _part(self, choices: list[dict[str, Any]]) -> str:
        """An event before the last one, whose usage is null, as in OpenAI's API."""
        return _event(self.shape.event(choices) | ({"usage": None} if self.with_usage else {}))


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def usage(answers: Answers) -> dict[str, Any]:
    """The numbers of tokens of a request. A prompt counts once, however many answers it has, as in OpenAI's API."""
    prompt_tokens = sum(len(request.prompt) for request in answers.requests[:: answers.per_prompt])
    completion_tokens = sum(len(answer.tokens) for answer in answers.answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answers.num_reused},
    }
