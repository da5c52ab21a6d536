"""Handles SIGINT, SIGTERM and SIGUSR1: the first signal ends a run after its step, the second at once."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any

import jax

from meshpar.errors import ConfigError
from meshpar.mesh.join import INTERRUPTED, SIGNALS

GRACE_S = 2.0
_SHOW_CURSOR = b"\033[?25h"


class Interrupted(KeyboardInterrupt):
    """A signal ended the run; the same command resumes it."""

    exit_code = INTERRUPTED


class Signals:
    """Records signals within `listening`, and only there.

    A run has three phases. Before its first step there is nothing to save: `Interrupted` is raised at once. JAX may
    compile for minutes without running any Python, so a thread ends a process that does not respond within `GRACE_S`.
    During a step, the signal is only stored in `caught`, which the loop reads. While the run waits for a batch,
    `Interrupted` is raised.

    Joined processes end together: JAX's coordination service, which handles SIGTERM itself, decides after which step.
    The other signals are turned into SIGTERM.

    Args:
      caught: the first signal that came.
    """

    def __init__(self) -> None:
        self.caught: signal.Signals | None = None
        self._has_begun = False
        self._raises = True
        self._answered = threading.Event()
        self._stderr = 2

    @property
    def name(self) -> str:
        return self.caught.name if self.caught else "SIGTERM, or a signal to another process"

    def nothing_to_save(self) -> str:
        what = f"stopped by {self.name} before the first step"
        return f"{what}: there was nothing to save; the same command starts it again"

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handles the signals within, and restores the earlier handlers on exit. Signals that are ignored stay so.

        Raises:
          ConfigError: this is not the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("signals can be handled in the main thread only: call fit there, or without signals=True")
        before = {number: signal.getsignal(number) for number in SIGNALS}
        if jax.distributed.is_initialized():
            with self._passed_on(before):
                yield
            return
        with ExitStack() as stack:
            receive, send = (stack.enter_context(end) for end in socket.socketpair())
            send.setblocking(False)
            with suppress(OSError):  # there may be no standard error
                self._stderr = os.dup(2)
                stack.callback(os.close, self._stderr)
            thread = threading.Thread(target=self._watch, args=(receive,), name="signals", daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(send.shutdown, socket.SHUT_RDWR)
            stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(send.fileno(), warn_on_full_buffer=False))
            for number, handler in before.items():
                if handler != signal.SIG_IGN:
                    signal.signal(number, self._handle)
                    stack.callback(signal.signal, number, handler)
            yield

    @contextmanager
    def _passed_on(self, before: dict[signal.Signals, Any]) -> Iterator[None]:
        """Turns the other signals into SIGTERM, whose handler is JAX's own."""

        def pass_on(number: int, frame: FrameType | None) -> None:
            self.caught = signal.Signals(number)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

        others = [number for number in SIGNALS if number != signal.SIGTERM and before[number] != signal.SIG_IGN]
        for number in others:
            signal.signal(number, pass_on)
        try:
            yield
        finally:
            for number in others:
                signal.signal(number, before[number])

    def begin(self) -> None:
        """Starts the steps: from here on a signal is only recorded."""
        self._raises = False
        self._has_begun = True
        if self.caught and not jax.distributed.is_initialized():
            raise Interrupted(self.nothing_to_save())

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Makes signals raise `Interrupted` within."""
        self._raises = True
        try:
            if self.caught:
                raise Interrupted
            yield
        finally:
            self._raises = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.caught = signal.Signals(number)
        for each in SIGNALS:
            if signal.getsignal(each) == self._handle:
                signal.signal(each, signal.SIG_DFL)
        self._answered.set()
        if self._raises:
            raise Interrupted(self.nothing_to_save())

    def _watch(self, receive: socket.socket) -> None:
        """Receives signals in a thread, even while the main thread runs no Python."""
        num_heard = 0
        while number := receive.recv(1):
            if number[0] not in SIGNALS:
                continue
            num_heard += 1
            if num_heard > 1:
                if self._answered.wait(GRACE_S / 4):
                    os.kill(os.getpid(), number[0])
                os._exit(128 + number[0])
            if not self._has_begun and not self._answered.wait(GRACE_S):
                self.caught = signal.Signals(number[0])
                end = f"meshpar: {self.nothing_to_save()}\n".encode()
                with suppress(OSError):
                    os.write(self._stderr, _SHOW_CURSOR + end if os.isatty(self._stderr) else end)
                os._exit(INTERRUPTED)
