"""What XLA says while it compiles, for it says it on standard error alone, past Python's streams."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SAYS_WARNING = b"Involuntary full rematerialization"
_END = b"\0\n"
_turn = threading.RLock()


@contextmanager
def compiling() -> Iterator[list[str]]:
    """Collects the partitioner's warnings while the body of the `with` compiles; all other lines pass on.

    Standard error belongs to the process: two threads that compile so take turns, and what other threads write
    meanwhile goes the same way as XLA's. A program that comes from the compilation cache, or a process started with
    `TF_CPP_MIN_LOG_LEVEL=2`, has no warnings.

    Returns:
      A list, complete at the end of the `with`; for `inspect(compiled, mesh, warnings=...)`.

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
        except OSError:  # closed: nothing to hear
            yield warnings
            return
        # A pipe that a thread empties while XLA compiles (without Python's lock), and no file that is read in the end:
        # should XLA abort, its last words get out.
        receive, send = os.pipe()
        heard = threading.Event()
        threading.Thread(target=_listen, args=(receive, stderr, warnings, heard), daemon=True).start()
        os.dup2(send, 2)
        try:
            yield warnings
        finally:
            os.dup2(stderr, 2)
            os.write(send, _END)
            os.close(send)
            heard.wait()


def _listen(receive: int, stderr: int, warnings: list[str], heard: threading.Event) -> None:
    """Reads to the end of the pipe: a process that was started meanwhile can hold it open for long."""
    with open(receive, "rb", buffering=0) as pipe:
        rest = b""
        while some := pipe.read(1 << 16):
            *lines, rest = (rest + some).split(b"\n")
            for line in lines:
                said = line.removesuffix(_END[:1])
                if _SAYS_WARNING in line:
                    warnings.append(said.decode(errors="replace"))
                else:
                    os.write(stderr, said if said != line else line + b"\n")
                if said != line:
                    heard.set()
    os.close(stderr)
