"""Copies the output of a process to the terminal as it arrives, and to a log line by line.

Only the log has what XLA's libraries print about themselves.
"""

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
_GLOO = b"[Gloo] Rank "
_NOISE = re.compile(
    rb"\[Gloo\] Rank [^\n]*\n"
    rb"|WARNING: All log messages before absl::InitializeLog[^\n]*\n"
    rb"|[IW]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w./-]+:\d+\] [^\n]*\n"
)
"""What XLA's libraries print about themselves: each connection of Gloo, and absl's messages below an error."""
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


def without_noise(text: bytes) -> bytes:
    """The output of a process without the lines that XLA's libraries print about themselves.

    >>> without_noise(b"[Gloo] Rank 0 is connected to 1 peer ranks.\\nW0000 00:00:01.2  7 a.cc:3] x\\nloss 3\\n")
    b'loss 3\\n'
    """
    return _NOISE.sub(b"", text)


def _pass_on(source: int, target: int, lines: FileIO) -> None:
    begun = b""
    held = b""
    with open(source, "rb", buffering=0) as output, suppress(OSError):  # a terminal ends with an error
        while chunk := output.read(CHUNK_BYTES):
            begun += chunk
            *complete, begun = begun.split(b"\n")
            _log(complete, lines)
            shown, held = _without_begun_noise(without_noise(held + chunk))
            _write(target, shown)
        _write(target, held)
    _log([begun] if begun else [], lines)


def _without_begun_noise(text: bytes) -> tuple[bytes, bytes]:
    """A text without the line of Gloo that it ends in, and that line.

    Gloo writes a line in pieces, and two of its threads write theirs in turn: a line may begin twice.
    """
    start = text.find(_GLOO, text.rfind(b"\n") + 1)
    if start < 0:
        start = next((len(text) - n for n in range(len(_GLOO), 0, -1) if text.endswith(_GLOO[:n])), len(text))
    return text[:start], text[start:]


def _write(target: int, text: bytes) -> None:
    while text:
        text = text[os.write(target, text) :]


def _log(complete: list[bytes], lines: FileIO) -> None:
    """Writes each line in the state in which a terminal shows it at its end."""
    for line in complete:
        shown = _CONTROL.sub(b"", line).rstrip(b"\r").rpartition(b"\r")[2]
        with suppress(OSError, ValueError):  # the disk is full, or the log was closed
            lines.write(shown + b"\n")
