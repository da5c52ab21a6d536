"""What the endpoints of every kind of model share: who may ask, and which models there are."""

from __future__ import annotations

import hmac
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from meshpar.serve.http.errors import HANDLERS, ApiError

LARGEST_BODY = 2**22
"""The largest body of a request, in bytes."""
Answers = Callable[[HttpRequest], Awaitable[Response]]


class Endpoints(ABC):
    """Answers HTTP requests.

    Args:
      name: the name of the model.
      token: the bearer token that clients must send; None if there is none.
      hosts: the values of the header Host that are accepted. A page of another site whose name was made to resolve to
        this address sends another one (DNS rebinding).
      adapters: the names of the adapters that requests can choose as their model.
    """

    def __init__(
        self, name: str, token: str | None = None, hosts: Sequence[str] = ("*",), adapters: Sequence[str] = ()
    ):  # fmt: skip
        self.name, self.token, self.hosts, self.adapters = name, token, hosts, adapters

    @property
    @abstractmethod
    def routes(self) -> list[Route]:
        """Those beside `/v1/models` and `/health`."""

    @abstractmethod
    async def health(self, http: HttpRequest) -> Response:
        """`/health`: whether requests are accepted."""

    lifespan: Any = None
    """What runs beside the application, see Starlette."""

    def app(self) -> Starlette:
        models = [self.guarded("/v1/models", self.models), self.guarded("/v1/models/{name:path}", self.one_model)]
        routes = [*self.routes, *models, Route("/health", self.health)]
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=self.hosts)
        return Starlette(routes=routes, middleware=[hosts], exception_handlers=HANDLERS, lifespan=self.lifespan)

    def guarded(self, path: str, answer: Answers, methods: Sequence[str] = ("GET",)) -> Route:
        """A route that refuses requests without the bearer token, if there is one."""

        async def answer_guarded(http: HttpRequest) -> Response:
            sent = http.headers.get("authorization", "").encode("utf-8", "surrogateescape")
            if self.token is not None and not hmac.compare_digest(sent, f"Bearer {self.token}".encode()):
                what = "the header Authorization: Bearer TOKEN is missing or wrong"
                raise ApiError(401, what, code="invalid_api_key")
            return await answer(http)

        return Route(path, answer_guarded, methods=list(methods))

    async def models(self, http: HttpRequest) -> Response:
        """`/v1/models`."""
        return JSONResponse({"object": "list", "data": self._models})

    async def one_model(self, http: HttpRequest) -> Response:
        """`/v1/models/NAME`."""
        self.check_model(name := http.path_params["name"])
        return JSONResponse(next(model for model in self._models if model["id"] == name))

    def check_model(self, name: str | None) -> None:
        """Refuses a request for another model."""
        if name not in (None, self.name, *self.adapters):
            known = ", ".join(map(repr, (self.name, *self.adapters)))
            what = f"there is no model {name[:100]!r}, only {known}"
            raise ApiError(404, what, "model", "model_not_found")

    @property
    def _models(self) -> list[dict[str, Any]]:
        about = {"object": "model", "created": 0, "owned_by": "meshpar"}
        adapters = [{"id": name, **about, "parent": self.name} for name in self.adapters]
        return [{"id": self.name, **about}, *adapters]


async def body_of(http: HttpRequest) -> bytes:
    """The body of a request, which must be JSON.

    A browser sends JSON to another site only if that site allows it in a preflight request. This server does not, so
    pages of other sites cannot use it.
    """
    if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(400, "the header Content-Type must be application/json")
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > LARGEST_BODY:
            raise ApiError(413, f"the body is larger than {LARGEST_BODY} bytes")
    return bytes(body)
