"""Random requests: valid ones, valid ones with a wrong value, and what is no request at all."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

from tests.serve.client import JSON

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3.5, -0.0, 1e308, 10**30, -(2**63), "", "1", "\ud800", "\x00", "a" * 3000, [], [[]],
    [1, "1"], [[1], [2, 3]], [None], {}, {"a": {"b": [1]}}, [1] * 40, [10**12], "28 3", [{"type": "text", "text": "1"}],
]  # fmt: skip
KEYS = [
    "prompt", "max_tokens", "temperature", "top_p", "top_k", "seed", "n", "stop", "stream", "stream_options", "model",
    "messages", "logprobs", "user", "echo", "unknown", "", "__class__", "tools", "tool_choice",
    "response_format", "structured_outputs", "repetition_penalty", "min_p", "stop_token_ids", "logit_bias",
]  # fmt: skip
PATHS = [
    "/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics", "/", "/page.js", "/../pages.py",
    "/v1", "/v1/completions/", "/\x00", "/" + "a" * 300, "/%2e%2e/x", "//", "/é",
]  # fmt: skip
NO_JSON = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"prompt": NaN}',
    b"[" * 20_000,
    b'{"prompt": "\\ud800"}',
    b"1" * 9000,
]
HEADERS: list[dict[str, str]] = [
    {}, {"content-type": "text/plain"}, {"content-type": "application/json; charset=latin-1"}, {"Content-Type": "\xff"},
    JSON | {"authorization": "Bearer \xff"}, JSON | {"content-length": "-1"}, JSON | {"accept": "text/event-stream"},
]  # fmt: skip


class Sent(NamedTuple):
    path: str
    body: bytes
    method: str
    headers: dict[str, str]
    leave_after: int | None


def valid(drawn: random.Random) -> dict[str, Any]:
    prompt = [drawn.randrange(29) for _ in range(drawn.randint(1, 20))]
    body = {"prompt": prompt, "max_tokens": drawn.randint(1, 12), "temperature": drawn.choice([0, 0.5, 1.0])}
    more = {"stream": True, "n": 2, "top_p": 0.7, "top_k": 3, "seed": 1, "stop": ["1", "2 3"]}
    return body | {key: more[key] for key in more if drawn.random() < 0.25}


def request(drawn: random.Random) -> Sent:
    """Three in four go to the endpoint of completions; two in three of those are valid."""
    leave_after = drawn.choice([None] * 7 + [0, 1, 4])
    if drawn.random() < 0.5:
        return Sent("/v1/completions", json.dumps(valid(drawn)).encode(), "POST", JSON, leave_after)
    if drawn.random() < 0.5:
        body = valid(drawn) | {drawn.choice(KEYS): drawn.choice(VALUES) for _ in range(drawn.randint(1, 3))}
        path = drawn.choice(PATHS[:2]) if drawn.random() < 0.2 else PATHS[0]
        return Sent(path, json.dumps(body).encode(), "POST", JSON, leave_after)
    body = drawn.choice(NO_JSON) if drawn.random() < 0.5 else json.dumps(valid(drawn)).encode()[: drawn.randint(0, 60)]
    method = drawn.choice(["POST", "GET", "DELETE", "HEAD", "OPTIONS", "WHAT"])
    return Sent(drawn.choice(PATHS), body, method, drawn.choice(HEADERS), leave_after)
