"""Waits until something is so."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

LIMIT_S = 240


def wait_for(is_so: Callable[[], object], running: subprocess.Popen[str] | None = None) -> None:
    """Raises AssertionError if it takes too long, or if `running`, which should do it, ends before."""
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert running is None or running.poll() is None, running.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(process: int) -> bool:
    """Whether a process runs: it exists, and is not one that has ended and that nobody waited for."""
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def read_until(terminal: int, end: bytes) -> bytes:
    """What was written to a terminal, which may arrive in pieces, up to `end` at least."""
    text = b""
    while end not in text:
        text += os.read(terminal, 9999)
    return text
