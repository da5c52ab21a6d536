"""Collects the warnings that XLA writes directly to the file descriptor of standard error while it compiles."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_WARNING = b"Involuntary full rematerialization"
_END = b"\0\n"
_ERASE = b"\r\x1b[2K"
"""Clears the line of a terminal in which a spinner or a progress bar is, which is drawn again below the text."""
_turn = threading.RLock()


@contextmanager
def compiling() -> Iterator[list[str]]:
    """Collects the partitioner's warnings while the body of the `with` compiles, and forwards all other lines.

    Standard error belongs to the whole process: threads that use `compiling` wait for each other, and the output of
    other threads passes through the same pipe. There are no warnings for a program from the compilation cache, nor in
    a process that was started with `TF_CPP_MIN_LOG_LEVEL=2`.

    Returns:
      A list for `inspect(compiled, mesh, warnings=...)`, complete at the end of the `with`.

    Examples:
      >>> import jax
      >>> with compiling() as warnings:
      ...     compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
      >>> warnings
      []
    """
    warnings: list[str] = []
    with _turn:
        try:
            stderr = os.dup(2)
        except OSError:  # standard error is closed
            yield warnings
            return
        # A thread empties a pipe while XLA compiles without Python's lock. A file that is read at the end would lose
        # XLA's last messages if it aborts.
        receive, send = os.pipe()
        finished = threading.Event()
        threading.Thread(target=_forward, args=(receive, stderr, warnings, finished), daemon=True).start()
        os.dup2(send, 2)
        try:
            yield warnings
        finally:
            os.dup2(stderr, 2)
            os.write(send, _END)
            os.close(send)
            finished.wait()


def _forward(receive: int, stderr: int, warnings: list[str], finished: threading.Event) -> None:
    """Sorts the lines of the pipe, and sets `finished` at `_END`.

    It continues to the end of the pipe, because a process that was started in between may still write to it.
    """
    before = _ERASE if os.isatty(stderr) else b""
    with open(receive, "rb", buffering=0) as pipe:
        rest = b""
        while received := pipe.read(1 << 16):
            *lines, rest = (rest + received).split(b"\n")
            for line in lines:
                text = line.removesuffix(_END[:1])
                if _WARNING in line:
                    warnings.append(text.decode(errors="replace"))
                else:
                    os.write(stderr, (before + text if text else b"") if text != line else before + line + b"\n")
                if text != line:
                    finished.set()
    os.close(stderr)
