"""The endpoints of an encoder: `/v1/embeddings` in OpenAI's shapes."""

from __future__ import annotations

import asyncio
import base64
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from meshpar.serve.embeddings import Embedder
from meshpar.serve.http.bodies import Body, parse
from meshpar.serve.http.endpoints import Endpoints, body_of
from meshpar.serve.http.errors import ApiError
from meshpar.serve.service import UnavailableError

MOST_TEXTS = 2048
Id = Annotated[int, Field(ge=0, lt=2**31)]


class EmbeddingBody(Body):
    """The keys of a request; `input` is a text, a list of texts, ids, or a list of lists of ids."""

    input: list[str] | list[list[Id]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int | None, Field(ge=1)] = None
    user: str | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [value]
        return [value] if isinstance(value, list) and value and isinstance(value[0], int) else value


class EmbeddingEndpoints(Endpoints):
    """Answers HTTP requests with vectors. One batch is computed at a time.

    Args:
      others: see `Endpoints`.
    """

    def __init__(self, embedder: Embedder, *others: Any, **more: Any):
        super().__init__(*others, **more)
        self.failure: Exception | None = None
        self.failed = asyncio.Event()
        self._embedder = embedder
        self._one = asyncio.Lock()
        self._is_draining = False

    @property
    def routes(self) -> list[Route]:
        of_text = ("/v1/chat/completions", "/v1/completions")
        refused = [self.guarded(path, self.refused, ["POST"]) for path in of_text]
        return [self.guarded("/v1/embeddings", self.embeddings, ["POST"]), *refused]

    async def embeddings(self, http: HttpRequest) -> Response:
        """`/v1/embeddings`."""
        body = parse(EmbeddingBody, await body_of(http))
        if self._is_draining:
            raise UnavailableError("the server is draining")
        self.check_model(body.model)
        width = self._embedder.text.width
        if body.dimensions not in (None, width):
            what = f"dimensions: the vectors of {self.name} have {width} numbers, and no part of one is a vector"
            raise ApiError(400, what, "dimensions")
        rows = await asyncio.to_thread(self._rows, body)
        async with self._one:
            found = await asyncio.to_thread(self._embedder.vectors, rows)
        data = [
            {"object": "embedding", "index": i, "embedding": _written(vector, body.encoding_format)}
            for i, vector in enumerate(found)
        ]
        num = sum(map(len, rows))
        usage = {"prompt_tokens": num, "total_tokens": num}
        return JSONResponse({"object": "list", "data": data, "model": self.name, "usage": usage})

    def _rows(self, body: EmbeddingBody) -> list[list[int]]:
        if not 0 < len(body.input) <= MOST_TEXTS:
            raise ApiError(400, f"input: {len(body.input)} texts; a request has 1 to {MOST_TEXTS}", "input")
        rows = [self._embedder.encode(x) if isinstance(x, str) else x for x in body.input]
        text = self._embedder.text
        for i, (given, row) in enumerate(zip(body.input, rows, strict=True)):
            if not given:
                raise ApiError(400, f"input[{i}]: is empty; write at least one character", "input")
            if len(row) > text.max_seq_len:
                what = f"input[{i}]: {len(row)} tokens, and the model reads {text.max_seq_len} at most; cut the text"
                raise ApiError(400, what, "input", "context_length_exceeded")
            if max(row) >= text.vocab_size:
                raise ApiError(400, f"input[{i}]: has ids outside of the vocabulary of {text.vocab_size}", "input")
        return rows

    async def health(self, http: HttpRequest) -> Response:
        """`/health`."""
        status = "draining" if self._is_draining else "ok"
        return JSONResponse({"status": status, "model": self.name}, 503 if self._is_draining else 200)

    async def refused(self, http: HttpRequest) -> Response:
        """What an encoder does not answer."""
        kind = self._embedder.model.config["model_type"]
        what = f"{self.name} is an encoder ({kind}), which generates no text; use /v1/embeddings"
        raise ApiError(400, what, code="no_generation")

    async def drain(self) -> None:
        """Refuses new requests, and waits until the others are answered."""
        self._is_draining = True
        async with self._one:
            pass


def _written(vector: np.ndarray, how: str) -> list[float] | str:
    if how == "float":
        return vector.tolist()
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
