"""Copies the output of a process to the terminal as it arrives, and to a log line by line."""

from __future__ import annotations

import os
import re
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

CHUNK_BYTES = 2**16
END_S = 2.0
"""Seconds for which children of the process may hold its output open after its end."""
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


@contextmanager
def relayed(log: Path) -> Iterator[tuple[int, int]]:
    """Yields file descriptors for a process's standard output and error. Close them once the process has started.

    They are terminals if this process writes to a terminal, so that the other process shows its progress bar. If both
    streams of this process go to one place, both descriptors are the same file, so that lines keep their order.
    """
    with log.open("ab", buffering=0) as lines:
        threads: list[threading.Thread] = []
        ends: list[int] = []
        for target in (1,) if os.path.sameopenfile(1, 2) else (1, 2):
            source, end = _connection(target)
            threads.append(threading.Thread(target=_pass_on, args=(source, target, lines), daemon=True))
            ends.append(end)
        for thread in threads:
            thread.start()
        try:
            yield ends[0], ends[-1]
        finally:
            for thread in threads:
                thread.join(END_S)


def _connection(target: int) -> tuple[int, int]:
    if not os.isatty(target):
        return os.pipe()
    source, end = os.openpty()
    termios.tcsetwinsize(end, termios.tcgetwinsize(target))
    return source, end


def _pass_on(source: int, target: int, lines: FileIO) -> None:
    begun = b""
    with open(source, "rb", buffering=0) as output, suppress(OSError):  # a terminal ends with an error
        while chunk := output.read(CHUNK_BYTES):
            begun += chunk
            *complete, begun = begun.split(b"\n")
            _log(complete, lines)
            while chunk:
                chunk = chunk[os.write(target, chunk) :]
    _log([begun] if begun else [], lines)


def _log(complete: list[bytes], lines: FileIO) -> None:
    """Writes each line in the state in which a terminal shows it at its end."""
    for line in complete:
        shown = _CONTROL.sub(b"", line).rstrip(b"\r").rpartition(b"\r")[2]
        with suppress(OSError, ValueError):  # the disk is full, or the log was closed
            lines.write(shown + b"\n")
