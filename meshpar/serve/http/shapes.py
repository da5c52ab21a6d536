"""The bodies of responses of OpenAI's API."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from meshpar.serve.answer import Answer, AnswerPiece, Finish
from meshpar.serve.http.logprobs import Texts
from meshpar.serve.http.tools import Form, read_calls
from meshpar.serve.service import Answers

FINISH: dict[Finish | None, str | None] = {"stop": "stop", "end": "stop", "length": "length", None: None}
"""Our reasons for the end of an answer -> OpenAI's."""


class Shape(ABC):
    """The objects with which an endpoint answers a request.

    Args:
      model: the name of the model.
      texts: of the tokens whose log-probabilities are asked for.
    """

    prefix: ClassVar[str]
    whole: ClassVar[str]
    part: ClassVar[str]
    kept: Collection[int] = ()
    """The special tokens whose texts are a part of an answer's."""

    def __init__(self, model: str, texts: Texts):
        self.model = model
        self.texts = texts
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    def response(self, answers: Answers) -> dict[str, Any]:
        """The response with all answers."""
        choices = [self.choice(i, answers) for i in range(len(answers.answers))]
        return self._object(self.whole, choices)

    def event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An event of a streamed response."""
        return self._object(self.part, choices)

    @abstractmethod
    def choice(self, index: int, answers: Answers) -> dict[str, Any]:
        """A complete answer."""

    @abstractmethod
    def delta(self, piece: AnswerPiece, answers: Answers, num_sent: int) -> dict[str, Any]:
        """A piece of an answer, of which so many tokens were sent before."""

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

    def __init__(self, model: str, texts: Texts, echoes: bool, prompts: Sequence[str | None]):
        super().__init__(model, texts)
        self.echoes = echoes
        self.prompts = prompts

    def choice(self, index: int, answers: Answers) -> dict[str, Any]:
        answer, prompt = answers.answers[index], answers.requests[index].prompt
        text = answer.text
        if self.echoes:
            text = self._echoed(prompt, self.prompts[index // answers.per_prompt], answer)
        logprobs = self.texts.completion(answer, prompt, self.echoes)
        return _completion(index, text, logprobs, FINISH[answer.finish])

    def delta(self, piece: AnswerPiece, answers: Answers, num_sent: int) -> dict[str, Any]:
        prompt = answers.requests[piece.row].prompt
        logprobs = self.texts.completion(answers.answers[piece.row], prompt, False, num_sent, piece.num_tokens)
        return _completion(piece.row, piece.text, logprobs, FINISH[piece.finish])

    def _echoed(self, prompt: Sequence[int], text: str | None, answer: Answer) -> str:
        """The prompt as it was sent, or its text if it was sent as ids, and the answer."""
        decode = self.texts.tokenizer.decode
        decoded = decode(prompt)
        following = decode([*prompt, *answer.tokens])[len(decoded) :] if answer.finish != "stop" else answer.text
        return (decoded if text is None else text) + following


@dataclass(frozen=True)
class Toolbox:
    """The tools that an answer may call.

    Args:
      form: how the model writes calls.
      names: those of the functions.
      is_parallel: whether an answer may have several calls; if not, only the first counts.
      marks: the special tokens of the form, whose texts are needed to read calls.
    """

    form: Form
    names: tuple[str, ...]
    is_parallel: bool
    marks: frozenset[int]

    def read(self, answer: Answer) -> tuple[str, list[dict[str, Any]]]:
        """The content and the calls of a complete answer. Without calls it is the answer's text."""
        return read_calls(self.form, answer.text, self.names, self.is_parallel)


class ChatShape(Shape):
    """The objects of `/v1/chat/completions`."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    part = "chat.completion.chunk"

    def __init__(self, model: str, texts: Texts, toolbox: Toolbox | None = None):
        super().__init__(model, texts)
        self.toolbox = toolbox
        self.kept = toolbox.marks if toolbox else ()
        self._shown: dict[int, int] = {}  # characters of each answer that were sent, if it may have calls

    def choice(self, index: int, answers: Answers) -> dict[str, Any]:
        answer = answers.answers[index]
        content, calls = self.toolbox.read(answer) if self.toolbox else (answer.text, [])
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        logprobs = self.texts.chat(answer, answers.requests[index].prompt)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": _finish(answer, calls)}

    def delta(self, piece: AnswerPiece, answers: Answers, num_sent: int) -> dict[str, Any]:
        answer, prompt = answers.answers[piece.row], answers.requests[piece.row].prompt
        logprobs = self.texts.chat(answer, prompt, num_sent, piece.num_tokens)
        if self.toolbox is None:
            return _part(piece.row, {"content": piece.text}, logprobs, FINISH[piece.finish])
        shown = self._shown.get(piece.row, 0)
        if piece.finish is None:
            end = max(shown, self.toolbox.form.begin(answer.shown))
            self._shown[piece.row] = end
            return _part(piece.row, {"content": answer.shown[shown:end]}, logprobs, None)
        content, calls = self.toolbox.read(answer)
        delta: dict[str, Any] = {"content": content[shown:]}
        if calls:
            delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(calls)]
        return _part(piece.row, delta, logprobs, _finish(answer, calls))

    def opening(self, index: int) -> list[dict[str, Any]]:
        return [_part(index, {"role": "assistant", "content": ""}, None, None)]


def _finish(answer: Answer, calls: Sequence[Any]) -> str | None:
    return "tool_calls" if calls and answer.finish != "length" else FINISH[answer.finish]


def _completion(index: int, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _part(index: int, delta: dict[str, Any], logprobs: Any, finish: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
