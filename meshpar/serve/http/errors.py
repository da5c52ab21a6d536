"""Errors in the shape of OpenAI's API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from meshpar.errors import MeshparError
from meshpar.serve.scheduler import QueueFullError
from meshpar.serve.service import UnavailableError


class ApiError(Exception):
    """A request that is refused.

    Args:
      status: of HTTP.
      message: what is wrong, and how to correct it.
      param: the key in the request's body that is wrong.
      code: a short name of the error, for programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return JSONResponse(self.body, self.status, headers)


KINDS = {401: "authentication_error", 429: "rate_limit_error", 503: "unavailable_error"}


def _answered(error_of: Callable[[Request, Any], ApiError]) -> Callable[[Request, Any], Awaitable[Response]]:
    async def response(http: Request, error: Any) -> Response:
        return error_of(http, error).response()

    return response


async def _disconnected(http: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)  # as nginx logs it; the client does not receive it


HANDLERS: dict[Any, Any] = {
    ApiError: _answered(lambda http, error: error),
    HTTPException: _answered(
        lambda http, error: ApiError(error.status_code, f"{http.method} {http.url.path}: {error.detail}")
    ),
    MeshparError: _answered(lambda http, error: ApiError(400, str(error))),
    QueueFullError: _answered(
        lambda http, error: ApiError(429, "too many requests wait; try again later", code="queue_full")
    ),
    UnavailableError: _answered(lambda http, error: ApiError(503, str(error))),
    ClientDisconnect: _disconnected,
    Exception: _answered(lambda http, error: ApiError(500, "the server failed to answer; the reason is in its log")),
}
"""Kind of exception -> the function that makes the response, for Starlette."""
