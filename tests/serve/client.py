"""A server in this process: an ASGI application without a socket, whose client can disconnect whenever it likes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from meshpar.data import Synthetic
from meshpar.data.tokenizer import Ids, Tokenizer
from meshpar.experiment.config import Run
from meshpar.models import Llama
from meshpar.optim import AdamW
from meshpar.serve.engine import Engine
from meshpar.serve.http.app import TextEndpoints
from meshpar.serve.source import Language, Source
from tests.serving import SIZES

IDS = Ids(vocab_size=30, bos=29)
"""The model samples no id of 29, so its answers end by their length or at a stop string."""
JSON = {"content-type": "application/json"}


class Reply(NamedTuple):
    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of a stream, without the mark of its end."""
        lines = self.body.decode().removesuffix("\n\n").split("\n\n")
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def source_of(tokenizer: Tokenizer = IDS, opening: tuple[int, ...] = (), **sizes: Any) -> Source:
    """A model whose parameters nobody restores: tests build their engine themselves."""
    model = Llama(**SIZES | sizes)
    run = Run(model=model, data=Synthetic(vocab_size=29), optim=AdamW(lr=1e-3), num_steps=1, run_dir="none")
    return Source(run, lambda structs: structs, Language(tokenizer, opening))


class Client:
    """Sends requests to an application."""

    def __init__(self, endpoints: TextEndpoints):
        self.endpoints = endpoints
        self.app = endpoints.app()

    async def send(
        self, path: str, body: bytes = b"", method: str = "POST", headers: dict[str, str] = JSON,
        leave_after: int | None = None,
    ) -> Reply:  # fmt: skip
        """Sends a request.

        Args:
          leave_after: the client disconnects after so many messages of the response; None if it stays.
        """
        encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": method,
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": encoded, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        messages: list[Any] = []
        left = asyncio.Event()
        requests = iter([{"type": "http.request", "body": body, "more_body": False}])
        if leave_after == 0:
            left.set()

        async def receive() -> Any:
            for request in requests:
                return request
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            messages.append(message)
            if len(messages) == leave_after:
                left.set()

        await self.app(scope, receive, send)
        status = messages[0]["status"] if messages else 0
        return Reply(status, b"".join(message.get("body", b"") for message in messages))

    async def post(self, path: str, **body: Any) -> Reply:
        return await self.send(path, json.dumps(body).encode())

    async def complete(self, prompt: Any, **settings: Any) -> Reply:
        return await self.post("/v1/completions", prompt=prompt, **settings)

    async def get(self, path: str, headers: dict[str, str] = {}) -> Reply:  # noqa: B006 (it is not changed)
        return await self.send(path, method="GET", headers=headers)

    @property
    def num_held(self) -> int:
        """The pages that requests hold."""
        return sum(pool.num_held for pool in self.endpoints.service.scheduler.pools)


@asynccontextmanager
async def serving(engine: Engine, source: Source | None = None, **settings: Any) -> AsyncIterator[Client]:
    """A client of a running server, which must hold nothing at the end."""
    client = Client(TextEndpoints(engine, source or source_of(), "tiny", **settings))
    async with client.app.router.lifespan_context(client.app):
        yield client
    assert client.num_held == 0
    assert client.endpoints.service.scheduler.is_idle
