"""Runs the application in uvicorn. It shuts down when all accepted requests are answered."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette

from meshpar.errors import ConfigError, RunError


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address, which does not listen yet. Port 0 selects a free one.

    Raises:
      ConfigError: the address is in use, or does not exist.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with contextlib.ExitStack() as unless_bound:
            bound = unless_bound.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            unless_bound.pop_all()
    except OSError as error:
        raise ConfigError(f"nothing can listen at {host}:{port}: {error.strerror}; choose another --port") from None
    return bound


class Serves(Protocol):
    """What a server needs of the service behind its endpoints."""

    failure: Exception | None
    failed: asyncio.Event

    async def drain(self) -> None:
        """See `Service.drain`."""
        ...


def run(app: Starlette, service: Serves, bound: socket.socket, ready: Callable[[], None]) -> None:
    """Serves until SIGTERM or SIGINT. Then new requests are refused, accepted ones are answered, and it returns.

    A second signal ends it at once.

    Args:
      ready: called when the server listens.

    Raises:
      RunError: the engine failed.
    """
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on")
    asyncio.run(_Server(config, service, ready).serve(sockets=[bound]))
    if service.failure:
        raise RunError(f"the server has failed: {service.failure}") from service.failure


class _Server(uvicorn.Server):
    """Keeps the socket open while it drains, so that new requests are told why they are refused.

    Uvicorn's own handler of signals closes the socket first.
    """

    def __init__(self, config: uvicorn.Config, service: Serves, ready: Callable[[], None]):
        super().__init__(config)
        self._service = service
        self._ready = ready
        self._ending: asyncio.Task[None] | None = None

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self._watching = asyncio.create_task(self._watch())
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        yield

    def _on_signal(self) -> None:
        if self._ending:
            self.force_exit = True
            self.should_exit = True
        self._ending = self._ending or asyncio.create_task(self._end())

    async def _end(self) -> None:
        await self._service.drain()
        self.should_exit = True

    async def _watch(self) -> None:
        """Ends the server if the engine fails."""
        await self._service.failed.wait()
        self.should_exit = True
