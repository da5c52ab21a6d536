"""The bodies of responses of OpenAI's API."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from meshpar.serve.answer import Answer, Finish
from meshpar.serve.generator import Piece

FINISH: dict[Finish | None, str | None] = {"stop": "stop", "end": "stop", "length": "length", None: None}
"""Our reasons for the end of an answer -> OpenAI's."""


class Shape(ABC):
    """The objects with which an endpoint answers a request.

    Args:
      model: the name of the model.
    """

    prefix: ClassVar[str]
    whole: ClassVar[str]
    part: ClassVar[str]

    def __init__(self, model: str):
        self.model = model
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    def response(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The response with all answers."""
        choices = [self.choice(i, answer.text, FINISH[answer.finish]) for i, answer in enumerate(answers)]
        return self._object(self.whole, choices)

    def event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An event of a streamed response."""
        return self._object(self.part, choices)

    @abstractmethod
    def choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        """A complete answer."""

    @abstractmethod
    def delta(self, piece: Piece) -> dict[str, Any]:
        """A piece of an answer."""

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The choices of a stream's first event; none for completions."""
        return []

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


class CompletionShape(Shape):
    """The objects of `/v1/completions`."""

    prefix = "cmpl"
    whole = "text_completion"
    part = "text_completion"

    def choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}

    def delta(self, piece: Piece) -> dict[str, Any]:
        return self.choice(piece.row, piece.text, FINISH[piece.finish])


class ChatShape(Shape):
    """The objects of `/v1/chat/completions`."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    part = "chat.completion.chunk"

    def choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish}

    def delta(self, piece: Piece) -> dict[str, Any]:
        return self._part(piece.row, {"content": piece.text}, FINISH[piece.finish])

    def opening(self, index: int) -> list[dict[str, Any]]:
        return [self._part(index, {"role": "assistant", "content": ""}, None)]

    def _part(self, index: int, delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
