"""Errors in the shape of OpenAI's API."""

from __future__ import annotations

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


async def _api_error(http: Request, error: ApiError) -> Response:
    return error.response()


async def _http_error(http: Request, error: HTTPException) -> Response:
    return ApiError(error.status_code, f"{http.method} {http.url.path}: {error.detail}").response()


async def _bad_request(http: Request, error: MeshparError) -> Response:
    return ApiError(400, str(error)).response()


async def _queue_full(http: Request, error: QueueFullError) -> Response:
    return ApiError(429, "too many requests wait; try again later", code="queue_full").response()


async def _unavailable(http: Request, error: UnavailableError) -> Response:
    return ApiError(503, str(error)).response()


async def _disconnected(http: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)  # as nginx logs it; the client does not receive it


async def _failure(http: Request, error: Exception) -> Response:
    return ApiError(500, "the server failed to answer; the reason is in its log").response()


HANDLERS: dict[Any, Any] = {
    ApiError: _api_error,
    HTTPException: _http_error,
    MeshparError: _bad_request,
    QueueFullError: _queue_full,
    UnavailableError: _unavailable,
    ClientDisconnect: _disconnected,
    Exception: _failure,
}
"""Kind of exception -> the function that makes the response, for Starlette."""
